// Lines, ranges and numbers of the charts of metrics. Pure.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { smooth } from "./smooth.js";

const DIGITS = 6;

/** Format a value of an unknown unit. */
export function formatMetric(value, digits = DIGITS) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.min(digits - 1, 3));
  return String(Number(value.toPrecision(digits)));
}

export const sortPoints = (points) => [...points].map(([step, point]) => ({ step, ...point })).sort((a, b) => a.step - b.step);

/** Return lines and columns. A single line is also shown smoothed. */
export function drawLines(shown, name, steps, weight) {
  const tables = shown.map(({ points }) => {
    const sorted = steps ? points : [...points].sort((a, b) => a.time - b.time);
    return [sorted.map((point) => (steps ? point.step : point.time)), sorted.map(({ value }) => value)];
  });
  if (shown.length !== 1) {
    const lines = shown.map(({ rank }, index) => ({ label: `rank ${rank}`, token: `--series-${index}`, dash: index % 2 ? [6, 3] : undefined }));
    return { columns: tables.length > 0 ? uPlot.join(tables) : [[]], lines };
  }
  const [[xs, ys]] = tables;
  const label = shown[0].rank === 0 ? name : `rank ${shown[0].rank}`;
  if (!(weight > 0)) return { columns: [xs, ys], lines: [{ label, token: "--series-0" }] };
  return { columns: [xs, ys, smooth(ys, weight)], lines: [{ label, token: "--series-0", faint: true }, { label: "smoothed", token: "--series-0" }] };
}

/** Return the steps of all lines with the earliest time of each, so that steps and times increase. */
export function stepsAndTimes(shown) {
  const times = new Map();
  for (const { points } of shown) for (const { step, time } of points) times.set(step, Math.min(time, times.get(step) ?? time));
  const step = [...times.keys()].sort((a, b) => a - b);
  let latest = -Infinity;
  return { step, time: step.map((one) => (latest = Math.max(latest, times.get(one)))) };
}

/** Return a mark at the first value of each rank that is not finite. */
export function findFaults(shown) {
  return shown.flatMap(({ rank, points }) => {
    const first = points.find(({ words }) => words);
    return first ? [{ kind: "fault", time: first.time, step: first.step, text: `${first.words} on rank ${rank}` }] : [];
  });
}

/** Return a range with a margin. A range of rounding errors would have more ticks than numbers. */
export function fit(_, low, high) {
  if (low === null || high === null || low === undefined) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const margin = Math.max((high - low) * 0.08, size * 1e-6) || 1;
  return high - low < size * 1e-6 ? [low - size * 0.05 - margin, high + size * 0.05 + margin] : [low - margin, high + margin];
}
