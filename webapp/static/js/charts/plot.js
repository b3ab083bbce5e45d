// A chart over time that shares its range, its cursor and its marks with all others of the page.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { notMoreOftenThan } from "../dom.js";
import { exactTime, integer } from "../format.js";
import { chartKeys, legendWords } from "./keys.js";
import { KINDS, drawMarks } from "./marks.js";
import { momentWords } from "./moment.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";
import { TIME_STEPS, clockTicks, stepAt, stepTicks, tickWords } from "./ticks.js";

const SYNC = uPlot.sync("page");
const CLICK_PX = 4;
const TICK_PX = 72;
const NEAR = 40; // places
const UNSEEN_MS = 5000;

/**
 * `options`: {height, label, values (of ticks), value (of the legend), size (of the y axis), steps: whether ticks are
 * optimiser steps, range, unit (in words, of values without one)}. Returns update({columns, lines}): columns [times, ...values]; lines [{label, token, dash,
 * faint, dots, fill, own: what its legend tells where it is drawn elsewhere}]. `page`: {view, curve, marks}, of which the last two may change. Out of sight it is drawn seldom.
 */
export function plot(container, page, options) {
  const { view } = page;
  let chart = null;
  let shown = null; // {columns, lines}
  let drawn = "";
  let seen = false;
  const drawUnseen = notMoreOftenThan(UNSEEN_MS, draw);

  function build() {
    chart?.destroy();
    drawn = signature(shown.lines);
    const colors = Object.fromEntries(Object.entries(KINDS).map(([kind, { token }]) => [kind, color(token)]));
    const pin = color("--accent");
    chart = new uPlot(
      {
        width: Math.max(160, Math.floor(container.clientWidth)),
        height: options.height,
        padding: [14, 28, 0, 0], // room for the marks' letters, and for half of the last time
        cursor: {
          sync: { key: SYNC.key, filters: { pub: moves } },
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => view.follow(null) },
          dataIdx: nearestTold,
        },
        legend: { markers: MARKERS },
        scales: { x: { time: false, range: () => view.window() }, y: { range: options.range ?? fromZero } },
        axes: [xAxis(options.steps, page), axis(options.label, tickWords(options.values), options.size)],
        series: [{ label: options.steps ? "optimiser step" : "time", value: (_, time) => moment(time, options.steps, page.curve) }, ...shown.lines.map(seriesOf)],
        bands: shown.lines.some((line) => line.fill) ? stackBands(shown.lines.length) : [],
        hooks: {
          setScale: [(self, key) => key === "x" && tell(self)],
          setSelect: [(self) => zoomed(self, view)],
          draw: [(self) => drawMarks(self, page.marks, colors), (self) => drawPin(self, view.now.at, pin)],
          ready: [(self) => pinOnClick(self, view), rest],
        },
      },
      shown.columns,
      container,
    );
  }

  function seriesOf({ label, token, dash, faint, dots, fill }, place) {
    const stroke = color(token);
    return {
      label,
      stroke: faint ? translucent(stroke, 0.35) : stroke,
      fill: fill ? translucent(stroke, 0.55) : undefined,
      width: faint ? 1 : 1.5,
      dash,
      spanGaps: dots,
      points: dots ? { show: true, size: 6 } : { show: () => shown.columns[0].length < 2 },
      value(_, drawnAt, __, index) {
        const own = shown.lines[place].own;
        const value = own ? own[index] : drawnAt;
        return value === null || value === undefined ? "–" : options.value(value);
      },
    };
  }

  /** What is drawn, for whoever reads no pixels. */
  function tell({ scales, data }) {
    container.dataset.window = `${scales.x.min} ${scales.x.max}`;
    container.dataset.points = data[0].length;
  }

  /** Where no mouse points, the cursor stands where keys moved it, or where it was pinned. */
  function rest() {
    if (!view.pointed && chart.root.matches(":hover")) return;
    const at = view.cursor;
    const left = at === null ? -10 : chart.valToPos(at, "x");
    chart.setCursor({ left, top: at === null ? -10 : 1 }, false);
  }

  /** At once: a cursor's place is one on the range as it then is. */
  function change(how) {
    chart.batch(how);
    rest();
  }

  function draw() {
    if (!shown) return;
    if (!chart) listen();
    if (!chart || drawn !== signature(shown.lines)) build();
    else change(() => chart.setData(shown.columns));
  }

  function listen() {
    container.addEventListener("mousemove", () => view.point(null), { capture: true });
    chartKeys(container, {
      xs: () => shown.columns[0],
      at: () => view.cursor,
      point: view.point,
      range: () => view.window(),
      whole: () => view.extent,
      zoom: view.zoom,
      all: () => view.follow(null),
      reset: view.reset,
      enter: () => view.cursor !== null && view.pin(view.now.at === view.cursor ? null : view.cursor),
      words: () => `${momentWords(view.cursor, page)}: ${legendWords(chart, options.unit)}`,
      rangeWords: () => view.window().map((time) => exactTime(new Date(time * 1000))).join(" to "),
      help: "Enter pins it. All charts of the page have one cursor and one range.",
    });
  }

  view.onPoint(() => chart && rest());
  view.subscribe(() => {
    if (!chart) return;
    const [min, max] = view.window();
    change(() => chart.setScale("x", { min, max }));
  });
  new IntersectionObserver(([entry]) => {
    seen = entry.isIntersecting;
    if (seen) draw();
  }, { rootMargin: "100px" }).observe(container);
  keepFitting(container, () => chart && build(), () => chart);
  return (next) => {
    if (next.columns[0].length === 0) return;
    shown = next;
    container.querySelector(".waiting")?.remove();
    if (seen) draw();
    else drawUnseen();
  };
}

/** Charts tell each other where the mouse is, not its presses: a drag would be taken by each of them in turn. */
const moves = (type) => type === "mousemove" || type === "mouseleave";

/**
 * Lines told at times of their own share one column of times, where the others have `undefined`: the legend tells each
 * line's nearest place. A `null` is such a place: it was told that there is no number.
 */
export function nearestTold(chart, line, index) {
  const values = chart.data[line];
  for (let off = 0; off < NEAR; off += 1) {
    if (values[index - off] !== undefined) return index - off;
    if (values[index + off] !== undefined) return index + off;
  }
  return index;
}

const signature = (lines) => lines.map(({ label, token, faint }) => `${label} ${token} ${faint}`).join();
const fromZero = (_, _low, high) => [0, high > 0 ? high * 1.08 : 1];

function xAxis(steps, page) {
  if (!steps) return { ...axis(null, clockTicks, 42), incrs: TIME_STEPS, space: TICK_PX };
  const words = new Map();
  const splits = (chart, _, min, max) => {
    const ticks = stepTicks(page.curve, min, max, chart.width / TICK_PX);
    words.clear();
    for (const tick of ticks) words.set(tick.time, tick.words);
    return ticks.map((tick) => tick.time);
  };
  return { ...axis(null, (_, ticks) => ticks.map((tick) => words.get(tick) ?? ""), 24), splits };
}

function moment(time, steps, curve) {
  if (time === null || time === undefined) return "–";
  const clock = exactTime(new Date(time * 1000));
  const step = steps ? stepAt(curve, time) : null;
  return step === null ? clock : `${integer(step)} · ${clock}`;
}

function translucent(rgb, share) {
  return rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);
}

/** Each line of a stack is filled down to the one below it. */
function stackBands(number) {
  return Array.from({ length: number - 1 }, (_, index) => ({ series: [index + 1, index + 2] }));
}

function zoomed(chart, view) {
  const { left, width } = chart.select;
  if (width <= CLICK_PX) return;
  chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  view.zoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
}

/** A click pins the cursor at its time, one on the pin takes it off. */
function pinOnClick(chart, view) {
  let pressed = null;
  chart.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  chart.over.addEventListener("mouseup", (event) => {
    if (pressed === null || Math.abs(event.clientX - pressed) > CLICK_PX) return;
    const left = event.clientX - chart.over.getBoundingClientRect().left;
    const { at } = view.now;
    const again = at !== null && Math.abs(chart.valToPos(at, "x") - left) <= CLICK_PX;
    view.pin(again ? null : chart.posToVal(left, "x"));
  });
}

function drawPin(chart, at, stroke) {
  const { min, max } = chart.scales.x;
  if (at === null || at < min || at > max) return;
  const { ctx, bbox } = chart;
  const x = Math.round(chart.valToPos(at, "x", true));
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.lineWidth = 2 * (devicePixelRatio || 1);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}
