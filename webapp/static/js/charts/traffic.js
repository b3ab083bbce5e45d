// Traffic over time: one line per rank for up to 16 ranks, or all ranks together, stacked by axis.
import { byAxis } from "../collectives.js";
import { byteRate } from "../format.js";
import { plot } from "./plot.js";

export const MOST_LINES = 16;

export function trafficChart(container, page) {
  const options = { height: 158, label: "payload bytes/s", values: byteRate, value: byteRate, size: 80, grows: true };
  return plot(container, page, options);
}

/** Return columns and lines of the chart. If `filling`, drop the last bin, because an incomplete bin looks like a fall. */
export function trafficLines(bins, by, accepts, filling) {
  const found = by === "axis" ? stacked(bins, accepts) : ofRanks(bins, accepts);
  if (filling) {
    for (const column of found.columns) column.pop();
    for (const line of found.lines) if ("own" in line) line.own.pop();
  }
  return found;
}

/** Return the ranks that have their own line. */
export const ranksDrawn = (bins) => [...bins.rows.keys()].sort((a, b) => a - b).slice(0, MOST_LINES);

function ofRanks(bins, accepts) {
  const ranks = ranksDrawn(bins);
  const lines = ranks.map((rank, index) => ({
    label: `rank ${rank}`,
    token: `--series-${index}`,
    dash: index % 2 ? [6, 3] : undefined, // lines of ranks with equal traffic stay visible
  }));
  return { columns: [bins.times(), ...ranks.map((rank) => bins.rate(rank, accepts))], lines };
}

/** Stack the axes. The top line is the sum of all axes. The legend shows the value of each axis. */
function stacked(bins, accepts) {
  const keys = [...bins.rows.values()].flatMap((row) => [...row.keys()]);
  const axes = [...new Set(keys.filter(accepts).map((key) => key.split("/")[0]))].sort(byAxis);
  const own = axes.map((axis) => sumOfRanks(bins, (key) => key.startsWith(`${axis}/`) && accepts(key)));
  const height = new Array(bins.length).fill(0);
  const tops = own.map((values) => values.map((value, bin) => (value === null ? null : (height[bin] += value))));
  const lines = axes.map((axis, index) => ({ label: axis, token: `--axis-${axis}`, fill: true, own: own[index] }));
  return { columns: [bins.times(), ...tops.reverse()], lines: lines.reverse() };
}

function sumOfRanks(bins, accepts) {
  const sums = new Array(bins.length).fill(0);
  for (const rank of bins.rows.keys()) {
    bins.rate(rank, accepts).forEach((value, bin) => (sums[bin] = value === null ? null : (sums[bin] ?? 0) + value));
  }
  return sums;
}
