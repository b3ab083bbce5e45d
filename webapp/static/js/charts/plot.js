// A chart over steps or time. All charts of a page share one range, one cursor and the marks.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { notMoreOftenThan } from "../dom.js";
import { exactTime, integer } from "../format.js";
import { chartKeys, legendWords } from "./keys.js";
import { KINDS, drawMarks } from "./marks.js";
import { momentWords } from "./moment.js";
import { MARKERS, axis, color, keepFitting, xSplits } from "./theme.js";
import { binarySplits, clockSplits, clockTicks, findStep, stepSplits, tickWords, findTime, valueSplits } from "./ticks.js";

const CLICK_PX = 4;
const VALUE_TICK_PX = 26; // least distance between ticks of the y axis
const MAX_LOOK = 40; // points to each side, when a line has no value at the cursor
const UNSEEN_MS = 5000;
const LEGEND_PX = 50;
const MIN_GROWING_PX = 400;

/**
 * Return update({columns, lines, steps}). `columns` are [xs, ...values]; xs are steps if `steps` is true, else unix seconds.
 * `lines` are [{label, token, dash, faint, dots, fill, own}]; `own` has the values for the legend of a stacked line.
 * `options` are {height, label, values (formats ticks), value (formats the legend), size (of the y axis), range, unit,
 * isBinary (ticks at powers of two), xLabel (of an axis of steps), grows (uses the height of the container)}.
 * `page` is {view, curve, marks}. Charts outside the viewport are drawn less often.
 */
export function plot(container, page, options) {
  const { view } = page;
  let chart = null;
  let shown = null; // {columns, lines, steps}
  let drawn = "";
  let seen = false;
  const drawUnseen = notMoreOftenThan(UNSEEN_MS, draw);
  const toX = (time) => (shown.steps ? findStep(page.curve, time) : time);
  const toTime = (x) => (shown.steps ? findTime(page.curve, x) : x);

  function xRange() {
    const [from, to] = view.window().map(toX);
    return to > from ? [from, to] : [from - 0.5, from + 0.5];
  }

  /** Leave space for two lines of the legend. A narrow page needs more lines, so its plot does not grow. */
  function height() {
    const grown = options.grows && container.clientWidth >= MIN_GROWING_PX ? container.clientHeight - LEGEND_PX : 0;
    return Math.max(options.height, grown);
  }

  function build() {
    chart?.destroy();
    drawn = signature(shown);
    const colors = Object.fromEntries(Object.entries(KINDS).map(([kind, { token }]) => [kind, color(token)]));
    colors.letter = color("--surface");
    const pin = color("--accent");
    chart = new uPlot(
      {
        width: Math.max(160, Math.floor(container.clientWidth)),
        height: height(),
        padding: [14, 28, 0, 0], // space for the letters of marks, and for half of the last tick label
        cursor: {
          sync: { key: uPlot.sync(shown.steps ? "steps" : "times").key, filters: { pub: moves } },
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => view.follow(null) },
          dataIdx: nearestKnown,
        },
        legend: { markers: MARKERS },
        scales: { x: { time: false, range: xRange }, y: { range: options.range ?? fromZero } },
        axes: [xAxis(shown.steps, options.xLabel), { ...axis(options.label, tickWords(options.values), options.size), splits: ySplits(options.isBinary) }],
        series: [{ label: shown.steps ? (options.xLabel ?? "step") : "time", value: (_, x) => moment(x ?? shown.columns[0].at(-1)) }, ...shown.lines.map(makeSeries)],
        bands: shown.lines.some((line) => line.fill) ? stackBands(shown.lines.length) : [],
        hooks: {
          setScale: [(self, key) => key === "x" && describe(self)],
          setSelect: [zoomed],
          setCursor: [hovered],
          draw: [(self) => drawMarks(self, placedMarks(), colors), (self) => drawPin(self, view.now.at === null ? null : toX(view.now.at), pin)],
          ready: [pinOnClick, rest],
        },
      },
      shown.columns,
      container,
    );
  }

  function makeSeries({ label, token, dash, faint, dots, fill }, place) {
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
        const atRest = index === null || index === undefined;
        const value = atRest ? findLastValue(own ?? shown.columns[place + 1]) : own ? own[index] : drawnAt;
        return value === null || value === undefined ? "–" : options.value(value);
      },
    };
  }

  /** The range in unix seconds and the number of points, as attributes. */
  function describe({ scales, data }) {
    const [from, to] = shown.steps ? view.window() : [scales.x.min, scales.x.max];
    container.dataset.window = `${from} ${to}`;
    container.dataset.points = data[0].length;
  }

  /** Move the cursor to the time that the keys or the pin chose, unless the mouse is over this chart. */
  function rest() {
    if (!view.pointed && chart.root.matches(":hover")) return;
    const at = view.cursor;
    const left = at === null ? -10 : chart.valToPos(toX(at), "x");
    chart.setCursor({ left, top: at === null ? -10 : 1 }, false);
  }

  /** Send the cursor of the mouse to the charts that have the other x axis. */
  function hovered(self) {
    if (!self.over.matches(":hover")) return;
    const { left } = self.cursor;
    view.hover(left >= 0 ? toTime(self.posToVal(left, "x")) : null, shown.steps === true);
  }

  function zoomed(self) {
    const { left, width } = self.select;
    if (width <= CLICK_PX) return;
    self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    view.zoom(toTime(self.posToVal(left, "x")), toTime(self.posToVal(left + width, "x")));
  }

  /** Pin the cursor where the reader clicks. A click on the pin removes the pin. */
  function pinOnClick(self) {
    let pressed = null;
    self.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    self.over.addEventListener("mouseleave", () => view.hover(null, shown.steps === true));
    self.over.addEventListener("mouseup", (event) => {
      if (pressed === null || Math.abs(event.clientX - pressed) > CLICK_PX) return;
      const left = event.clientX - self.over.getBoundingClientRect().left;
      const { at } = view.now;
      const again = at !== null && Math.abs(self.valToPos(toX(at), "x") - left) <= CLICK_PX;
      view.pin(again ? null : toTime(self.posToVal(left, "x")));
    });
  }

  function placedMarks() {
    if (!shown.steps) return page.marks;
    const { step } = page.curve;
    const isStep = (mark) => mark.step !== null && mark.step !== undefined && mark.step <= step.at(-1);
    return page.marks.map((mark) => ({ ...mark, time: isStep(mark) ? mark.step : toX(mark.time) }));
  }

  function moment(x) {
    if (x === null || x === undefined) return "–";
    const clock = exactTime(new Date(toTime(x) * 1000));
    return shown.steps ? `${integer(x)} · ${clock}` : clock;
  }

  /** Change the range first, because the place of the cursor depends on the range. */
  function change(how) {
    chart.batch(how);
    rest();
  }

  function draw() {
    if (!shown) return;
    if (!chart) listen();
    if (!chart || drawn !== signature(shown)) build();
    else change(() => chart.setData(shown.columns));
  }

  function listen() {
    container.addEventListener("mousemove", () => view.point(null), { capture: true });
    chartKeys(container, {
      xs: () => shown.columns[0].map(toTime),
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
      help: "Enter pins the cursor. All charts of the page share the cursor and the time range.",
    });
  }

  view.onPoint(() => chart && rest());
  view.onHover((at, fromSteps) => {
    if (!chart || fromSteps === (shown.steps === true) || chart.over.matches(":hover")) return;
    if (at === null) rest();
    else chart.setCursor({ left: chart.valToPos(toX(at), "x"), top: 1 }, false);
  });
  view.subscribe(() => {
    if (!chart) return;
    const [min, max] = xRange();
    change(() => chart.setScale("x", { min, max }));
  });
  new IntersectionObserver(([entry]) => {
    seen = entry.isIntersecting;
    if (seen) draw();
  }, { rootMargin: "100px" }).observe(container);
  keepFitting(container, () => chart && build(), () => chart, height);
  return (next) => {
    if (next.columns[0].length === 0) return;
    shown = next;
    container.querySelector(".waiting")?.remove();
    if (seen) draw();
    else drawUnseen();
  };
}

/** Charts share moves of the mouse. They do not share presses, because each chart would then handle one drag. */
const moves = (type) => type === "mousemove" || type === "mouseleave";

/**
 * Return the index of the nearest point of a line. Lines with points at different x share one column of x, and have
 * `undefined` where they have no point. A `null` is a point without a number.
 */
export function nearestKnown(chart, line, index) {
  const values = chart.data[line];
  for (let off = 0; off < MAX_LOOK; off += 1) {
    if (values[index - off] !== undefined) return index - off;
    if (values[index + off] !== undefined) return index + off;
  }
  return index;
}

const signature = ({ lines, steps }) => [steps, ...lines.map(({ label, token, faint }) => `${label} ${token} ${faint}`)].join();
const findLastValue = (values) => values.findLast((value) => value !== null && value !== undefined);
const fromZero = (_, _low, high) => [0, high > 0 ? high * 1.08 : 1];

const ySplits = (isBinary) => (chart, _, min, max) =>
  (isBinary ? binarySplits : valueSplits)(min, max, chart.bbox.height / (devicePixelRatio || 1) / VALUE_TICK_PX);

function xAxis(steps, label = "step") {
  const words = steps ? (_, ticks) => ticks.map(integer) : clockTicks;
  return { ...axis(steps ? label : null, words, steps ? 24 : 42), splits: xSplits(steps ? stepSplits : clockSplits, words) };
}

function translucent(rgb, share) {
  return rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);
}

/** Fill each line of a stack down to the line below. */
function stackBands(number) {
  return Array.from({ length: number - 1 }, (_, index) => ({ series: [index + 1, index + 2] }));
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
