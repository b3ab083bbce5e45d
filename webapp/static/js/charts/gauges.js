// Memory per rank with the plan, and CPU, GPU and network load per host, over time.
import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { byteRate, bytes } from "../format.js";
import { plot } from "./plot.js";
import { MOST_LINES } from "./traffic.js";

const percent = (value) => `${value.toFixed(0)}%`;
const cores = (value) => (value < 10 ? value.toFixed(1) : value.toFixed(0));

/** Charts by id of the container. `fields` are the gauges and their labels. `of` is ranks, hosts or both. */
export const GAUGE_CHARTS = {
  "memory-chart": { of: "ranks", label: "memory", value: bytes, size: 76, isBinary: true },
  "cpu-chart": { of: "hosts", fields: { cpu: "in use" }, label: "CPU cores used", unit: "cores", value: cores, size: 52 },
  "network-chart": { of: "hosts", fields: { sent_bytes_s: "sent", received_bytes_s: "received" }, label: "network", value: byteRate, size: 80 },
  "gpu-chart": { of: "both", fields: { gpu_percent: "busy" }, label: "GPU utilization", value: percent, size: 52 },
};

export function gaugeChart(container, page) {
  const { label, value, size, unit, isBinary } = GAUGE_CHARTS[container.id];
  return plot(container, page, { height: 158, label, value, values: value, size, unit, isBinary });
}

/** Return columns and lines of one gauge. `names` are hosts by node. */
export function gaugeLines({ of, fields }, gauges, names) {
  const keys = [...gauges.keys()].filter((key) => (of === "hosts" ? key < 0 : true)).sort((a, b) => (a < 0 && b < 0 ? b - a : a - b));
  const found = [];
  for (const key of keys) {
    for (const [field, word] of Object.entries(fields)) {
      const columns = gauges.get(key);
      if (!columns[field].some((value) => value !== null)) continue;
      const who = key < 0 ? (names.get(-1 - key) ?? "host") : `rank ${key}`;
      found.push({ label: Object.keys(fields).length > 1 ? `${who} ${word}` : who, columns: [columns.time, columns[field]] });
    }
  }
  return joined(found);
}

/** Return one memory gauge of the ranks with the most memory, and the planned peak as a horizontal line. */
export function memoryLines(field, gauges, planned, window) {
  const found = [...gauges.keys()]
    .filter((key) => key >= 0 && gauges.get(key)[field].some((value) => value !== null))
    .sort((a, b) => a - b)
    .map((key) => ({ label: `rank ${key}`, columns: [gauges.get(key).time, gauges.get(key)[field]] }));
  const lines = joined(found, fullest(found));
  if (planned === null || lines.columns[0].length === 0) return lines;
  lines.lines.push({ label: "plan", token: "--ink-faint", dash: [8, 4] });
  lines.columns = uPlot.join([lines.columns, [window, window.map(() => planned)]]);
  return lines;
}

/** Return the memory gauges that any rank reports. */
export function memoryFields(gauges) {
  const isReported = (field) => [...gauges].some(([key, columns]) => key >= 0 && columns[field].some((value) => value !== null));
  return ["allocated_bytes", "reserved_bytes", "resident_bytes"].filter(isReported);
}

/** Return the lines with the highest peaks, in the order of `found`. */
function fullest(found) {
  const most = new Map(found.map((one) => [one, one.columns[1].reduce((high, value) => Math.max(high, value ?? 0), 0)]));
  const highest = new Set([...found].sort((a, b) => most.get(b) - most.get(a)).slice(0, MOST_LINES));
  return found.filter((one) => highest.has(one));
}

/** Join the lines on one time column. `left` is the number of lines that are not drawn. */
function joined(found, shown = found.slice(0, MOST_LINES)) {
  const left = found.length - shown.length;
  const lines = shown.map(({ label }, index) => ({ label, token: `--series-${index}`, dash: index % 2 ? [6, 3] : undefined }));
  if (shown.length === 0) return { columns: [[]], lines, left };
  return { columns: uPlot.join(shown.map(({ columns }) => columns)), lines, left };
}
