// Folds items of hosts: gauges, start of the run, stalled ranks. Pure.
import { logKey } from "../logs/lines.js";

const MOST_POINTS = 200_000; // of all ranks together
const FEWEST_POINTS = 64; // per rank
export const GAUGES = [
  "resident_bytes",
  "allocated_bytes",
  "reserved_bytes",
  "cpu",
  "sent_bytes_s",
  "received_bytes_s",
  "gpu_percent",
  "gpu_clock_mhz",
  "gpu_power_w",
  "gpu_celsius",
];

/** Add a gauge. Columns are by name, with null for missing values. The key of a host is -1 - node. */
export function foldGauge(state, item, node) {
  if (item.peak_bytes !== undefined) {
    state.peaks.set(item.rank, item.peak_bytes); // the item has no other value
    return;
  }
  const key = logKey(item.rank, node);
  if (!state.gauges.has(key)) state.gauges.set(key, { time: [], ...Object.fromEntries(GAUGES.map((name) => [name, []])) });
  const columns = state.gauges.get(key);
  if (columns.time.length > 0 && item.time <= columns.time.at(-1)) return;
  columns.time.push(item.time);
  for (const name of GAUGES) columns[name].push(item[name] ?? null);
  const most = Math.max(FEWEST_POINTS, Math.floor(MOST_POINTS / state.gauges.size));
  if (columns.time.length <= most) return;
  for (const name of Object.keys(columns)) columns[name] = columns[name].filter((_, index) => index % 2 === 0);
}

/** Record the end of a start stage, by rank, or by -1 - node for a host. */
export function foldStart(state, item, node) {
  const key = logKey(item.rank, node);
  if (!state.starts.has(key)) state.starts.set(key, {});
  state.starts.get(key)[item.stage] ??= item.time;
}

export function foldStanding(state, item) {
  if (item.still > 0) state.standing.set(item.rank, item);
  else state.standing.delete(item.rank);
}

export function foldProcess(state, item) {
  state.processes.set(item.rank, item);
}
