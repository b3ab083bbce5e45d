// The Pareto front of a search: the least memory for each step time. Both axes are scaled to the layouts.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { bytes, duration } from "../format.js";
import { ownKeys } from "./keys.js";
import { MARKERS, axis, color, keepFitting } from "./theme.js";
import { valueSplits } from "./ticks.js";

const HEIGHT = 260;
const MAX_TICKS = 6;
const TICK_WIDTH = 90; // pixels
const PADDING = 0.08; // of the range, on both sides
const NEAR = 1.25; // The device line is shown if it is at most this far above the layouts.
const UNITS = [1, 2 ** 10, 2 ** 20, 2 ** 30, 2 ** 40];

/** The range of an axis: all values, and some space around them. */
export function paddedRange(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const space = high > low ? PADDING * (high - low) : PADDING * high || 1;
  return [Math.max(0, low - space), high + space];
}

/** Round amounts of memory, in the unit of the largest. */
function memorySplits(min, max) {
  const unit = UNITS.findLast((each) => each <= max) ?? 1;
  return valueSplits(min / unit, max / unit, MAX_TICKS).map((value) => value * unit);
}

/** Draws the chart and returns a function that removes it. */
export function paretoChart(container, front, capacity) {
  const times = front.map((f) => f.step_s);
  const memories = front.map((f) => f.memory_bytes);
  const isNear = capacity <= NEAR * Math.max(...memories);
  const [timeRange, memoryRange] = [paddedRange(times), paddedRange(isNear ? [...memories, capacity] : memories)];
  const device = isNear ? [memories.map(() => capacity)] : [];
  let chart = null;

  function build() {
    chart?.destroy();
    const options = {
      width: Math.max(200, Math.floor(container.clientWidth)),
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      legend: { markers: MARKERS },
      scales: { x: { time: false, range: timeRange }, y: { range: memoryRange } },
      axes: [
        { ...axis("step time", (_, ticks) => ticks.map((tick) => duration(tick)), 36), splits: (_, __, min, max) => valueSplits(min, max, Math.min(MAX_TICKS, container.clientWidth / TICK_WIDTH)) },
        { ...axis("peak memory per rank", (_, ticks) => ticks.map((tick) => bytes(tick)), 80), splits: (_, __, min, max) => memorySplits(min, max) },
      ],
      series: [
        { label: "step time", value: (_, value) => duration(value) },
        { label: "least memory", stroke: color("--series-0"), width: 1.5, points: { show: true, size: 7 }, value: (_, value) => bytes(value) },
        ...(isNear
          ? [{ label: "device memory", stroke: color("--bad"), width: 1, dash: [6, 4], points: { show: false }, value: (_, value) => bytes(value) }]
          : []),
      ],
    };
    chart = new uPlot(options, [times, memories, ...device], container);
    chart.setLegend({ idx: 0 }); // the fastest layout, until the cursor is on another
  }

  build();
  ownKeys(container, () => chart);
  const stop = keepFitting(container, build, () => chart);
  return () => {
    stop();
    chart.destroy();
  };
}
