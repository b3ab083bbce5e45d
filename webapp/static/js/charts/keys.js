// Keys for the cursor and the range of a chart, and spoken values for screen readers.
import { addKeys } from "../shell/keys.js";
import { el } from "../dom.js";
import { findPlace } from "./ticks.js";

const FAR = 10; // Shift moves by a tenth of the range
const ZOOM = 2;
const HELP = "The Left and Right keys move the cursor. With Shift, these keys move the cursor by a tenth of the chart range. The Home and End keys move the cursor to the start or the end of the chart.";

addKeys("On a focused chart", [
  { key: "← →", words: "Move the cursor" },
  { key: "Shift ← →", words: "Move the cursor by a tenth of the chart range" },
  { key: "Home End", words: "Move the cursor to the start or end of the chart" },
  { key: "+ −", words: "Zoom at the cursor" },
  { key: "Enter", words: "Pin the cursor, or compare the selected steps" },
  { key: "Escape", words: "Reset the chart range and the cursor" },
]);

/** Return the index of the value nearest to `at` in ascending `xs`. */
export function nearest(xs, at) {
  const place = Math.min(findPlace(xs, at), xs.length - 1);
  return place > 0 && at - xs[place - 1] <= xs[place] - at ? place - 1 : place;
}

/** Return the point that an arrow key moves to from `at` (null without a cursor), within the visible `range`. */
export function moved(xs, at, range, direction, far) {
  const [first, last] = [findPlace(xs, range[0]), findPlace(xs, range[1] + Number.EPSILON * Math.abs(range[1])) - 1];
  if (at === null) return xs[last < first ? nearest(xs, range[0]) : direction > 0 ? first : last];
  const by = far ? Math.max(1, Math.round((last - first) / FAR)) : 1;
  return xs[Math.max(0, Math.min(xs.length - 1, nearest(xs, at) + direction * by))];
}

/** Move a range within `whole` until the range contains `at`. */
export function shifted([from, to], whole, at) {
  if (at >= from && at <= to) return [from, to];
  const width = to - from;
  const start = Math.max(whole[0], Math.min(at - width / 2, whole[1] - width));
  return [start, start + width];
}

/** Scale a range by `factor` around `at`. Return null if the result covers `whole`. */
export function zoomed([from, to], whole, factor, at) {
  const width = (to - from) * factor;
  if (width >= whole[1] - whole[0]) return null;
  const about = at === null ? (from + to) / 2 : Math.max(from, Math.min(at, to));
  const start = Math.max(whole[0], Math.min(about - (about - from) * factor, whole[1] - width));
  return [start, start + width];
}

/** Describe the values at the cursor of a uPlot chart. `unit` is for values without one. */
export function legendWords(chart, unit = "") {
  const lines = chart.series.map(({ label, show }, place) => [label, show === false ? undefined : chart.legend.values[place]?._]);
  const values = lines.slice(1).filter(([, value]) => value !== undefined && value !== "–");
  return values.length > 0 ? values.map(([label, value]) => `${label} ${value}${unit && ` ${unit}`}`).join(", ") : "no value";
}

/** Write a text into the one live region of the page, for screen readers. */
function announce(words) {
  let place = document.getElementById("chart-status");
  if (!place) {
    place = el("p", { id: "chart-status", className: "visually-hidden", role: "status" });
    (document.querySelector("main") ?? document.body).append(place);
  }
  place.textContent = words;
}

/**
 * Add keys to the container of a chart, and make the container focusable. `cursor` is {xs(), at(), point(x), words(), help,
 * enter(), reset()}. A chart that zooms also has {range(), whole(), zoom(from, to), all(), rangeWords()}.
 */
export function chartKeys(container, cursor) {
  function go(x) {
    const range = cursor.range();
    const next = cursor.zoom ? shifted(range, cursor.whole(), x) : range;
    if (next[0] !== range[0]) cursor.zoom(...next);
    cursor.point(x);
    announce(cursor.words());
  }

  function zoom(factor) {
    const next = zoomed(cursor.range(), cursor.whole(), factor, cursor.at());
    if (next) cursor.zoom(...next);
    else cursor.all();
    announce(cursor.rangeWords());
  }

  const arrow = (direction) => (event) => go(moved(cursor.xs(), cursor.at(), cursor.range(), direction, event.shiftKey));
  const [closer, wider] = [() => zoom(1 / ZOOM), () => zoom(ZOOM)];
  const keys = {
    ArrowLeft: arrow(-1),
    ArrowRight: arrow(1),
    Home: () => go(cursor.xs()[0]),
    End: () => go(cursor.xs().at(-1)),
    Enter: cursor.enter,
    Escape() {
      cursor.reset();
      announce(cursor.zoom ? cursor.rangeWords() : "");
    },
    ...(cursor.zoom ? { "+": closer, "=": closer, "-": wider, _: wider } : {}),
  };

  container.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.target !== container || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event);
  });
  container.tabIndex = 0;
  container.setAttribute("role", "application");
  container.setAttribute("aria-roledescription", "chart");
  const zooms = cursor.zoom ? "The + and − keys zoom, and Escape resets the zoom." : "The Escape key removes the cursor.";
  container.setAttribute("aria-label", [`${getChartName(container)}.`, HELP, zooms, cursor.help].filter(Boolean).join(" "));
}

/** Return the caption of the figure, or the heading of the panel. */
function getChartName(container) {
  const named = container.closest("figure")?.querySelector("figcaption") ?? container.closest("section")?.querySelector("h2");
  return named?.textContent.trim() ?? "Chart";
}

/**
 * Add keys to a chart with its own cursor. `current()` returns the uPlot chart.
 * @param {Element & Record<string, any>} container
 * @param {() => any} current
 * @param {{zooms?: boolean, enter?: ((from: number, to: number) => void) | null, help?: string | null}} [settings]
 */
export function ownKeys(container, current, { zooms = false, enter, help } = {}) {
  let at = null;
  const xs = () => current().data[0];
  const range = () => [current().scales.x.min, current().scales.x.max];
  const whole = () => [xs()[0], xs().at(-1)];
  const moment = (x) => current().series[0].value(current(), x);

  function point(x) {
    at = x;
    const [left, top] = at === null ? [-10, -10] : [current().valToPos(at, "x"), 1];
    current().setCursor({ left, top });
  }

  function zoom(min, max) {
    current().batch(() => current().setScale("x", { min, max }));
    point(at);
  }

  chartKeys(container, {
    xs,
    at: () => at,
    point,
    range,
    whole,
    zoom: zooms ? zoom : undefined,
    all: () => zoom(...whole()),
    reset() {
      if (zooms) zoom(...whole());
      point(null);
    },
    words: () => `${current().series[0].label} ${moment(at)}: ${legendWords(current())}`,
    rangeWords() {
      const [from, to] = range();
      const seen = xs().filter((x) => x >= from && x <= to);
      return seen.length > 0 ? `${moment(seen[0])} to ${moment(seen.at(-1))}` : "no point";
    },
    enter: enter && (() => enter(range()[0], range()[1])),
    help,
  });
}
