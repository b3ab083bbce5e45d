// One figure of several runs over steps, time or tokens: a line each, in the run's colour.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { count, duration, integer } from "../format.js";
import { ownKeys } from "./keys.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";
import { tickWords } from "./ticks.js";

const HEIGHT = 220;
export const TOKENS = ["--series-0", "--series-1", "--series-2", "--series-3", "--series-4", "--series-9"];
/** What places a run's points along an axis, and how that is written. */
export const ALONG = {
  step: { column: "step", label: "optimiser step", words: integer },
  time: { column: "elapsed_s", label: "time since its first step began", words: duration },
  tokens: { column: "tokens", label: "tokens", words: count },
};

/** [xs, ys] of the points that are told, by rising place: a chart takes no other. */
export function told(xs, ys) {
  const points = xs.map((x, index) => [x, ys[index]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  points.sort(([a], [b]) => a - b);
  const distinct = points.filter(([x], index) => index === 0 || x !== points[index - 1][0]);
  return [distinct.map(([x]) => x), distinct.map(([, y]) => y)];
}

/**
 * `lines`: [{letter, place, xs, ys}]. Returns the chart, to be destroyed by who draws another in its stead.
 * `select(from, to)`, where given, takes what is dragged over instead of the zoom.
 */
export function runsChart(container, lines, { along, values, select }) {
  const data = uPlot.join(lines.map(({ xs, ys }) => told(xs, ys)));
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
        axes: [axis(ALONG[along].label, (_, ticks) => ticks.map(ALONG[along].words), 36), axis(null, tickWords(values), 70)],
        series: [
          { label: ALONG[along].label, value: (_, x) => (x === null ? "–" : ALONG[along].words(x)) },
          ...lines.map(({ letter, place }) => ({
            label: letter,
            stroke: color(TOKENS[place]),
            width: 1.5,
            spanGaps: true,
            value: (_, y) => (y === null || y === undefined ? "–" : values(y)),
          })),
        ],
        hooks: select ? { setSelect: [(self) => dragged(self, select)] } : {},
      },
      data,
      container,
    );
    if (range) chart.setScale("x", range);
  };
  build();
  ownKeys(container, () => chart, { zooms: true, enter: select, help: select && "Enter tells what differs about what is in sight." });
  const letGo = keepFitting(container, build, () => chart);
  return {
    destroy() {
      letGo();
      chart.destroy();
    },
  };
}

function dragged(chart, select) {
  const { left, width } = chart.select;
  if (width < 3) return;
  select(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
}
