// One quantity of several runs over steps, time or tokens. Each run has a line in its color.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { count, duration, integer, shortened } from "../format.js";
import { ownKeys } from "./keys.js";
import { MARKERS, axis, color, keepFitting, xSplits } from "./theme.js";
import { clockSplits, stepSplits, tickWords, valueSplits } from "./ticks.js";

const HEIGHT = 220;
export const TOKENS = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5"];
/** The x axes: column, label, number format and places of ticks. */
export const ALONG = {
  step: { column: "step", label: "step", words: integer, splits: stepSplits },
  time: { column: "elapsed_s", label: "time since the first step began", words: (seconds) => (seconds === 0 ? "0" : duration(seconds)), splits: clockSplits },
  tokens: { column: "tokens", label: "tokens", words: count, splits: valueSplits },
};
const MAX_NAME = 28; // characters of a run in a legend

/** Return [xs, ys] of the points that have numbers, sorted by x. uPlot requires sorted points. */
export function sortPoints(xs, ys) {
  const points = xs.map((x, index) => [x, ys[index]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  points.sort(([a], [b]) => a - b);
  const distinct = points.filter(([x], index) => index === 0 || x !== points[index - 1][0]);
  return [distinct.map(([x]) => x), distinct.map(([, y]) => y)];
}

/**
 * Draw `lines`, [{letter, name, place, xs, ys}]. Destroy the returned chart before you draw another one. With `select(from, to)`,
 * a drag calls `select` and does not zoom.
 */
export function runsChart(container, lines, { along, values, select }) {
  const points = lines.map(({ xs, ys }) => sortPoints(xs, ys));
  const data = uPlot.join(points);
  const last = (xy, at, words) => (xy[at].length > 0 ? words(xy[at].at(-1)) : "–");
  let chart = null;
  const build = () => {
    const range = chart && { min: chart.scales.x.min, max: chart.scales.x.max };
    chart?.destroy();
    chart = new uPlot(
      {
        width: Math.max(160, Math.floor(container.clientWidth)),
        height: HEIGHT,
        cursor: { drag: { x: true, y: false, setScale: !select } },
        legend: { markers: MARKERS },
        scales: { x: { time: false } },
        axes: [xAxis(ALONG[along]), axis(null, tickWords(values), 70)],
        series: [
          { label: ALONG[along].label, value: (_, x) => (x === null ? "last" : ALONG[along].words(x)) },
          ...lines.map(({ letter, name, place }, index) => ({
            label: `${letter} ${shortened(name, MAX_NAME)}`,
            stroke: color(TOKENS[place]),
            width: 1.5,
            spanGaps: true,
            value: (_, y, __, at) => (at === null || at === undefined ? last(points[index], 1, values) : y === null || y === undefined ? "–" : values(y)),
          })),
        ],
        hooks: select ? { setSelect: [(self) => dragged(self, select)] } : {},
      },
      data,
      container,
    );
    chart.root.querySelectorAll(".u-legend .u-label").forEach((label, index) => (label.title = index > 0 ? lines[index - 1].name : ""));
    if (range) chart.setScale("x", range);
  };
  build();
  ownKeys(container, () => chart, { zooms: true, enter: select, help: select && "The Enter key compares the visible steps with the other steps of each run." });
  const letGo = keepFitting(container, build, () => chart);
  return {
    destroy() {
      letGo();
      chart.destroy();
    },
  };
}

function xAxis({ label, words, splits }) {
  const getLabels = (_, ticks) => ticks.map(words);
  return { ...axis(label, getLabels, 36), splits: xSplits(splits, getLabels) };
}

function dragged(chart, select) {
  const { left, width } = chart.select;
  if (width < 3) return;
  select(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
}
