// Draws the rows of a step on a canvas. Events narrower than a pixel are merged, so the drawing time depends on the pixels
// and not on the number of events.
import { blend, channels, textOn } from "../charts/contrast.js";
import { upright } from "../upright.js";
import { BACKWARD_ALPHA, UNKNOWN_ALPHA, WAITING_ALPHA } from "./colors.js";
import { COMPUTE, within } from "./lanes.js";
import { waited } from "./step.js";

export const AXIS_HEIGHT = 22;
const NAMED_WIDTH = 30; // px, least width of a box with a name
const SMALLEST = 0.8; // px, least width of an event

/**
 * Draw the rows and return the number of boxes. `frame` is {width, height, left, top (scroll offset), rowHeight, gap} in CSS
 * pixels. `view` is the visible range in seconds. `ink(token)` returns a color.
 */
export function paint(context, rows, step, view, frame, ink, tokens) {
  const { width, height, left, rowHeight, gap } = frame;
  const scale = (width - left) / Math.max(1e-12, view.to - view.from);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  let drawn = 0;
  placesInSight(rows, frame).forEach(([row, y]) => {
    if (row.first) {
      context.fillStyle = ink("--line");
      context.fillRect(0, Math.round(y - gap), width, 1);
    }
    context.save();
    context.beginPath();
    context.rect(left, AXIS_HEIGHT, width - left, height - AXIS_HEIGHT);
    context.clip();
    drawn += paintRow(context, row, view, { y, left, scale, rowHeight, beyond: width }, ink, tokens);
    context.restore();
  });
  names(context, rows, frame, ink);
  ruler(context, view, frame, ink);
  return drawn;
}

/** Return the visible rows with their top in pixels. */
export function placesInSight(rows, { height, top, rowHeight, gap }) {
  const places = [];
  let y = AXIS_HEIGHT - top;
  for (const row of rows) {
    if (row.first) y += gap;
    if (y + rowHeight > AXIS_HEIGHT - 1 && y < height) places.push([row, y]);
    y += rowHeight;
  }
  return places;
}

export function contentHeight(rows, { rowHeight, gap }) {
  return AXIS_HEIGHT + rows.reduce((sum, row) => sum + rowHeight + (row.first ? gap : 0), 0);
}

function paintRow(context, row, view, place, ink, tokens) {
  const [first, beyond] = within(row, view.from, view.to);
  const { y, left, scale, rowHeight } = place;
  const tall = Math.max(1, rowHeight - 1);
  /** @type {any} */
  let pending = null;
  let [count, painted] = [0, 0];
  const flush = () => {
    if (!pending) return;
    context.globalAlpha = pending.alpha;
    context.fillStyle = ink(pending.token);
    context.fillRect(pending.from, y, Math.max(SMALLEST, pending.to - pending.from), tall);
    count += 1;
    pending = null;
  };
  const box = (from, to, token, alpha) => {
    const x = left + (Math.max(from, view.from) - view.from) * scale;
    const end = left + (Math.min(to, view.to) - view.from) * scale;
    if (end < painted) return; // within a painted pixel
    painted = Math.max(end, x + SMALLEST);
    if (pending && pending.token === token && pending.alpha === alpha && x <= pending.to + SMALLEST) pending.to = Math.max(pending.to, end);
    else {
      flush();
      pending = { from: x, to: Math.max(end, x + SMALLEST), token, alpha };
    }
  };
  for (let i = first; i < beyond; i += 1) {
    const event = row.events[i];
    const token = tokens(event);
    for (const part of getShades(row, event)) box(part.from, part.to, token, part.alpha);
  }
  flush();
  context.globalAlpha = 1;
  if (rowHeight >= 12) count += label(context, row, view, place, first, beyond, ink, tokens);
  return count;
}

/** Return the differently shaded boxes of an event, {from, to, alpha}: waiting and transfer of a call, or one box. */
function getShades(row, event) {
  if (row.name === COMPUTE) return [{ from: event.from, to: event.to, alpha: event.work === "backward" ? BACKWARD_ALPHA : 1 }];
  const wait = waited(event);
  const whole = event.from + (wait ?? 0);
  const transfer = { from: whole, to: event.to, alpha: wait === null ? UNKNOWN_ALPHA : 1 };
  return wait !== null && wait > 0 ? [{ from: event.from, to: whole, alpha: WAITING_ALPHA }, transfer] : [transfer];
}

/** Draw the names of events in their widest box, where they fit. Names of parallel events do not overlap. */
function label(context, row, view, { y, left, scale, rowHeight, beyond: width }, first, beyond, ink, tokens) {
  if (beyond - first > 400) return 0;
  const surface = channels(ink("--surface"));
  let free = left;
  for (let i = first; i < beyond; i += 1) {
    const event = row.events[i];
    const boxes = getShades(row, event).map(({ from, to, alpha }) => {
      return { x: Math.max(free, left + (from - view.from) * scale), end: Math.min(width, left + (to - view.from) * scale), alpha };
    });
    const { x, end, alpha } = boxes.reduce((widest, box) => (box.end - box.x > widest.end - widest.x ? box : widest));
    if (end - x < NAMED_WIDTH) continue;
    const text = event.work === undefined ? upright(String(event.op)) : event.micro < 0 ? event.work : `${event.work[0].toUpperCase()}${event.micro}`;
    const wide = context.measureText(text).width;
    if (wide >= end - x - 6) continue;
    context.fillStyle = textOn(blend(channels(ink(tokens(event))), surface, alpha));
    context.fillText(text, x + 3, y + rowHeight - 4);
    free = x + 3 + wide;
  }
  return 0;
}

/** Draw ranks on the left, and names of rows if rows are high enough. */
function names(context, rows, frame, ink) {
  const { left, rowHeight, height, gap } = frame;
  let free = AXIS_HEIGHT;
  context.clearRect(0, AXIS_HEIGHT, left, height);
  for (const [row, y] of placesInSight(rows, frame)) {
    if (row.first && y - gap > AXIS_HEIGHT) {
      context.fillStyle = ink("--line");
      context.fillRect(0, Math.round(y - gap), left, 1);
    }
    const roomy = rowHeight >= 11;
    if (!roomy && !(row.first && y >= free)) continue;
    if (y < AXIS_HEIGHT - 2) continue;
    context.fillStyle = ink(row.first ? "--ink" : "--ink-faint");
    const text = row.first ? `rank ${row.rank}` : upright(row.name);
    context.fillText(text, row.first ? 2 : 14, y + Math.max(9, Math.min(rowHeight - 3, 12)));
    free = y + 12;
  }
}

const TICKS = [1, 2, 5];

/** Return round times, at least `least` pixels apart. */
export function ticks(view, pixels, least = 90) {
  const wanted = ((view.to - view.from) * least) / Math.max(1, pixels);
  if (!(wanted > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = (TICKS.find((tick) => tick * power >= wanted) ?? 10) * power;
  const found = [];
  for (let n = Math.ceil(view.from / step); n * step <= view.to; n += 1) found.push(n * step);
  return found;
}

function ruler(context, view, { width, height, left }, ink) {
  context.clearRect(0, 0, width, AXIS_HEIGHT - 1);
  context.fillStyle = ink("--ink-faint");
  context.fillText("time", 2, 13);
  const marks = ticks(view, width - left);
  const gap = marks.length > 1 ? marks[1] - marks[0] : view.to - view.from;
  for (const time of marks) {
    const x = left + ((time - view.from) / (view.to - view.from)) * (width - left);
    context.globalAlpha = 0.5;
    context.fillStyle = ink("--line");
    context.fillRect(Math.round(x), AXIS_HEIGHT - 5, 1, height);
    context.globalAlpha = 1;
    context.fillStyle = ink("--ink-faint");
    const text = tickText(time, gap);
    const wide = context.measureText(text).width;
    if (x + 3 + wide <= width) context.fillText(text, x + 3, 13);
  }
}

/** Format a tick with enough digits to distinguish ticks. */
export function tickText(time, gap) {
  const [factor, unit] = gap < 1e-3 ? [1e6, "µs"] : gap < 1 ? [1e3, "ms"] : [1, "s"];
  const digits = Math.max(0, Math.min(3, -Math.floor(Math.log10(gap * factor) + 1e-9)));
  return `${(time * factor).toFixed(digits)} ${unit}`;
}
