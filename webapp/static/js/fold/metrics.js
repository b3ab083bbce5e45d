// Folds the metrics that a script reports: one series per name, source and rank. Pure.
import { mark } from "./steps.js";

const MOST_SERIES = 1000;
const MOST_POINTS = 4000; // per series (MAX_POINTS, jobs/runs/history/queries/metrics.py)
// In the order of preference (MetricSource, contracts/telemetry/metrics.py).
export const SOURCES = ["meshboard.log", "Trainer.log", "SummaryWriter", "wandb", "trackio", "mlflow", "event file", "log line", "numbered log line"];
export const NUMBERED = "numbered log line";
// Canonical names of a training loss, in the order of preference (contracts/telemetry/metrics.py).
const LOSS_NAMES = ["loss", "lm_loss", "global_avg_loss", "loss_metrics_global_avg_loss", "loss_step", "loss_epoch"];

/** Return a name that is equal for "loss", "train/loss" and "Loss/train" (get_canonical_name, contracts/telemetry/metrics.py). */
export function canonicalName(name) {
  const words = name.toLowerCase().split(/[\s/_.-]+/).filter(Boolean);
  const others = words.filter((word) => word !== "train" && word !== "training");
  return (others.length > 0 ? others : words).join("_");
}

export const isLoss = (name) => LOSS_NAMES.includes(canonicalName(name));

/** Fold an item of live telemetry. */
export function foldMetric(state, item) {
  if (item.left_out) state.metricsLeftOut.set(item.rank, item.left_out);
  for (const [name, value] of Object.entries(item.values)) keepPoint(state, { ...item, name }, item.step, item.time, value, null);
  for (const [name, words] of Object.entries(item.not_finite ?? {})) {
    keepPoint(state, { ...item, name }, item.step, item.time, null, words);
    if (isLoss(name)) mark(state, { kind: "fault", time: item.time, step: null, text: `loss is ${words}` });
  }
}

/** Fold the metrics of a stored history. */
export function foldStoredMetrics(state, { series, left_out, hidden_series }) {
  state.hiddenSeries = hidden_series;
  for (const [rank, counts] of Object.entries(left_out)) state.metricsLeftOut.set(Number(rank), counts);
  for (const one of series) {
    one.step.forEach((step, index) => keepPoint(state, one, step, one.time[index], one.value[index], one.not_finite[index]));
  }
}

/** Add a point. Above MOST_POINTS, drop every second point. The last value of a step remains. */
function keepPoint(state, { name, source, rank }, step, time, value, words) {
  const key = `${rank} ${source} ${name}`;
  let series = state.metrics.get(key);
  if (!series) {
    if (state.metrics.size >= MOST_SERIES) return;
    series = { name, source, rank, points: new Map() };
    state.metrics.set(key, series);
  }
  series.points.set(step, { time, value, words });
  if (series.points.size <= MOST_POINTS) return;
  let index = 0;
  for (const one of series.points.keys()) if ((index += 1) % 2 === 1 && one !== step) series.points.delete(one);
}

const getSourceOrder = (source) => (SOURCES.includes(source) ? SOURCES.indexOf(source) : SOURCES.length);

/** Return the series without those that a preferred source reports on the same rank. */
export function selectSeries(metrics) {
  const best = new Map();
  const key = ({ name, rank }) => `${rank} ${canonicalName(name)}`;
  const order = ({ source }) => getSourceOrder(source);
  for (const one of metrics.values()) best.set(key(one), Math.min(best.get(key(one)) ?? SOURCES.length, order(one)));
  return [...metrics.values()].filter((one) => order(one) === best.get(key(one)));
}

/** Return the last loss of a script, {step, loss, words, source}, of the preferred series (find_loss, contracts/telemetry/metrics.py). */
export function findLastLoss(metrics) {
  const order = ({ source, name, rank }) => [getSourceOrder(source), LOSS_NAMES.indexOf(canonicalName(name)), rank];
  const losses = [...metrics.values()].filter(({ name }) => isLoss(name));
  const [best] = losses.sort((a, b) => order(a).map((place, index) => place - order(b)[index]).find(Boolean) ?? 0);
  if (!best) return null;
  const [step, { value, words }] = [...best.points].at(-1);
  return { step, loss: value, words, source: best.source };
}

/** Return [{name, sources, lines}], first the losses, then by name. `lines` are series by rank. */
export function groupByName(series) {
  const groups = new Map();
  for (const one of series) {
    if (!groups.has(one.name)) groups.set(one.name, []);
    groups.get(one.name).push(one);
  }
  const rate = (name) => (isLoss(name) ? 0 : /loss/i.test(name) ? 1 : 2);
  return [...groups]
    .map(([name, lines]) => ({ name, lines: lines.sort((a, b) => a.rank - b.rank), sources: [...new Set(lines.map(({ source }) => source))] }))
    .sort((a, b) => rate(a.name) - rate(b.name) || (a.name < b.name ? -1 : 1));
}
