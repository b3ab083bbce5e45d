// The picture of a step timeline, with zoom, pan and selection by mouse, touch and keys.
import { eachFrame, el, legendEntry } from "../dom.js";
import { counted, integer } from "../format.js";
import { axisToken, BACKWARD_ALPHA, byMicro, palette, workToken } from "./colors.js";
import { COMPUTE, eventAt, arrangeRows } from "./lanes.js";
import { AXIS_HEIGHT, contentHeight, paint, placesInSight } from "./paint.js";
import { missingRanks, waited } from "./step.js";
import { moved, whole, zoomed } from "./window.js";
import { describeEvent } from "./words.js";

const LEFT = 64;
const TALLEST = 620;
const SMALLEST = 120;
const HELP = "To zoom, use the wheel, +, or −. To move the timeline, drag it or use ← and →. The Home key shows the whole step. The ↑ and ↓ keys choose a row. The comma and period keys choose an event.";

/** Return row heights. Rows of small runs are high enough for names. */
export function heights(rows) {
  const ranks = new Set(rows.map((row) => row.rank)).size;
  if (ranks <= 8) return { rowHeight: 16, gap: 6 };
  if (ranks <= 64) return { rowHeight: 7, gap: 4 };
  return { rowHeight: 4, gap: 2 };
}

const MAX_NAMED_RANKS = 8;

/** Describe why the waiting time of a call is unknown. */
function unknownWords(step) {
  const missing = missingRanks(step);
  if (missing.length === 0) return "the other ranks recorded no matching event";
  if (missing.length > MAX_NAMED_RANKS) return `events of ${integer(missing.length)} ranks are missing`;
  return `events of ${missing.length === 1 ? "rank" : "ranks"} ${missing.join(", ")} are missing`;
}

/** Return {show(step)}. A null step hides the picture. */
export function timelineView(container) {
  const canvas = el("canvas", { className: "timeline-canvas", tabIndex: 0, role: "img" });
  const text = el("output", { className: "note timeline-status" }, HELP);
  const legend = el("p", { className: "note legend" });
  const zoom = (name, label, act) => {
    const button = el("button", { type: "button", className: "button small", ariaLabel: label, title: label }, name);
    button.addEventListener("click", act);
    return button;
  };
  const context = canvas.getContext("2d");
  const ink = palette();
  /** @type {any} */
  let step = null;
  /** @type {any[]} */
  let rows = [];
  /** @type {any} */
  let chosen = null;
  /** @type {any} */
  let frame = null;
  let [view, top] = [{ from: 0, to: 1 }, 0];

  const tokens = (event) => (event.work === undefined ? axisToken(step.groups[event.group].axis) : workToken(event));
  const redraw = eachFrame(draw);
  const buttons = el(
    "div",
    { className: "actions timeline-buttons" },
    zoom("−", "Zoom out", () => look(zoomed(view, step.seconds, 0.5))),
    zoom("+", "Zoom in", () => look(zoomed(view, step.seconds, 2))),
    zoom("Whole step", "Show the whole step", () => look(whole(step.seconds))),
  );
  container.replaceChildren(buttons, canvas, text, legend);

  function draw() {
    if (!step) return;
    const size = heights(rows);
    const width = Math.max(240, Math.floor(container.clientWidth));
    const height = Math.max(SMALLEST, Math.min(TALLEST, contentHeight(rows, size) + 6));
    top = Math.max(0, Math.min(top, contentHeight(rows, size) + 6 - height));
    frame = { width, height, left: LEFT, top, ...size };
    const dense = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense)) {
      [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
      [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    }
    context.setTransform(dense, 0, 0, dense, 0, 0);
    canvas.dataset.boxes = String(paint(context, rows, step, view, frame, ink, tokens));
    canvas.dataset.from = String(view.from);
    canvas.dataset.to = String(view.to);
    if (chosen) outline();
  }

  function outline() {
    const place = placesInSight(rows, frame).find(([row]) => row === chosen.row);
    if (!place) return;
    const scale = (frame.width - LEFT) / (view.to - view.from);
    const x = LEFT + (Math.max(chosen.event.from, view.from) - view.from) * scale;
    const end = LEFT + (Math.min(chosen.event.to, view.to) - view.from) * scale;
    if (end < LEFT || x > frame.width) return;
    context.strokeStyle = ink("--ink");
    context.lineWidth = 2;
    context.strokeRect(x, place[1] - 1, Math.max(2, end - x), frame.rowHeight + 1);
  }

  function look(next) {
    view = next;
    redraw();
  }

  function choose(row, event) {
    chosen = event ? { row, event } : null;
    text.textContent = event ? describeEvent(event, step) : HELP;
    redraw();
  }

  const timeAt = (x) => view.from + ((x - LEFT) / (frame.width - LEFT)) * (view.to - view.from);
  const rowAt = (y) => placesInSight(rows, frame).find(([, from]) => y >= from && y < from + frame.rowHeight)?.[0] ?? null;

  function point(pointer) {
    if (!step || !frame) return;
    const box = canvas.getBoundingClientRect();
    const [x, y] = [pointer.clientX - box.left, pointer.clientY - box.top];
    const row = y > AXIS_HEIGHT ? rowAt(y) : null;
    const slack = (2 * (view.to - view.from)) / (frame.width - LEFT);
    const event = row && x >= LEFT ? eventAt(row, timeAt(x), slack) : null;
    if (event !== chosen?.event) choose(row, event);
  }

  canvas.addEventListener("wheel", (event) => {
    if (!step) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      look(moved(view, step.seconds, ((event.deltaX || event.deltaY) / box.width) * (view.to - view.from)));
    } else if (event.altKey) {
      top += event.deltaY;
      redraw();
    } else look(zoomed(view, step.seconds, event.deltaY < 0 ? 1.25 : 0.8, Math.max(view.from, timeAt(event.clientX - box.left))));
  }, { passive: false });

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (!step) return;
    drag = { x: event.clientX, y: event.clientY, view, top };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      point(event);
      return;
    }
    const seconds = ((drag.x - event.clientX) / (frame.width - LEFT)) * (drag.view.to - drag.view.from);
    top = drag.top + drag.y - event.clientY;
    look(moved(drag.view, step.seconds, seconds));
  });
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => (drag = null));
  canvas.addEventListener("pointerleave", () => drag || choose(null, null));

  function neighbour(by) {
    const row = chosen?.row ?? rows.find((one) => one.events.length > 0);
    if (!row) return;
    const place = chosen ? row.events.indexOf(chosen.event) + by : 0;
    const event = row.events[Math.max(0, Math.min(row.events.length - 1, place))];
    const width = view.to - view.from;
    if (event.to < view.from || event.from > view.to) view = moved({ from: event.from - width / 2, to: event.from + width / 2 }, step.seconds, 0);
    choose(row, event);
  }

  function anotherRow(by) {
    const from = chosen ? rows.indexOf(chosen.row) : -1;
    const moment = chosen?.event.from ?? view.from;
    for (let i = from + by; i >= 0 && i < rows.length; i += by) {
      const event = rows[i].events.findLast?.((one) => one.from <= moment) ?? rows[i].events[0];
      if (!event) continue;
      keepInSight(rows[i]);
      choose(rows[i], event);
      return;
    }
  }

  function keepInSight(row) {
    const size = heights(rows);
    const y = rows.slice(0, rows.indexOf(row) + 1).reduce((sum, one) => sum + size.rowHeight + (one.first ? size.gap : 0), 0);
    const room = frame.height - AXIS_HEIGHT;
    if (y - top > room) top = y - room + size.rowHeight;
    else if (y - size.rowHeight - size.gap < top) top = y - size.rowHeight - size.gap;
  }

  const KEYS = {
    "+": () => look(zoomed(view, step.seconds, 2)),
    "=": () => look(zoomed(view, step.seconds, 2)),
    "-": () => look(zoomed(view, step.seconds, 0.5)),
    Home: () => look(whole(step.seconds)),
    0: () => look(whole(step.seconds)),
    ArrowLeft: () => look(moved(view, step.seconds, -(view.to - view.from) / 10)),
    ArrowRight: () => look(moved(view, step.seconds, (view.to - view.from) / 10)),
    ArrowDown: () => anotherRow(1),
    ArrowUp: () => anotherRow(-1),
    ",": () => neighbour(-1),
    ".": () => neighbour(1),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!step || !act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  function showLegend() {
    const entries = new Map();
    const calls = [...step.ranks.values()].flatMap((own) => own.calls);
    for (const row of rows) {
      if (row.name !== COMPUTE) entries.set(row.name, axisToken(row.name));
      else for (const span of row.events) if (!byMicro(span)) entries.set(span.work, workToken(span));
    }
    const micro = rows.some((row) => row.name === COMPUTE && row.events.some(byMicro));
    const backward = legendEntry("--part-compute", "backward (B)");
    backward.firstChild.style.opacity = String(BACKWARD_ALPHA);
    legend.replaceChildren(
      ...(micro ? [legendEntry("--part-compute", "forward (F)"), " ", backward, " "] : []),
      ...[...entries].flatMap(([name, token]) => [legendEntry(token, name), " "]),
      micro ? "F0 and B0 belong to micro-batch 0. " : "",
      "In the bar of a collective, the pale part is waiting for the last rank, and the solid part is data transfer.",
      calls.some((call) => waited(call) === null) ? ` A medium shade means that the waiting time is unknown, because ${unknownWords(step)}.` : "",
    );
  }

  document.addEventListener("themechange", redraw);
  new ResizeObserver(redraw).observe(container);
  return {
    show(next) {
      if (next && next === step) return;
      const same = step && next && step.step === next.step;
      const atWhole = step && view.from === 0 && view.to === step.seconds;
      step = next;
      rows = next ? arrangeRows(next) : [];
      if (next && (!same || atWhole || view.to > next.seconds)) view = whole(next.seconds);
      if (!same) top = 0;
      choose(null, null); // the chosen event belongs to the previous step
      container.hidden = !next;
      if (!next) return;
      canvas.ariaLabel = `Timeline of step ${next.step}: ${counted(next.ranks.size, "rank")}, ${counted(rows.reduce((sum, row) => sum + row.events.length, 0), "event")}. ${HELP}`;
      showLegend();
      draw();
    },
  };
}
