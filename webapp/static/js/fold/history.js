// Folds the stored history of an attempt (Snapshot in jobs/runs/history) into a new state of store.js. The socket continues
// from the positions of the history. Pure: no DOM, no clock.
import { foldLog } from "../logs/lines.js";
import { foldPlace } from "../logs/places.js";
import { foldGauge, foldProcess, foldStanding, foldStart } from "./gauges.js";
import { foldStoredMetrics } from "./metrics.js";
import { keepStep, mark, recordLoss } from "./steps.js";
import { cellKey } from "./traffic.js";

const MARKS = new Set(["checkpoint", "validation", "resume", "fault"]);
const PART_COLUMNS = ["step_s", "data_s", "optimizer_s", "exposed", "hidden"];

/** Iterate over the rows of columns. */
export function* iterateRows(columns) {
  const names = Object.keys(columns);
  const length = names.length > 0 ? columns[names[0]].length : 0;
  for (let i = 0; i < length; i += 1) {
    const row = {};
    for (const name of names) row[name] = columns[name][i];
    yield row;
  }
}

/** Fold a history into a new `state`. `answer` is the JSON of /history/snapshot. */
export function foldHistory(state, answer) {
  state.attempt = answer.attempt;
  state.time = answer.time;
  state.lost = answer.lost;
  state.fromSummary = false;
  foldMembers(state, answer);
  foldRanks(state, answer);
  foldCurve(state, answer);
  if (answer.metrics) foldStoredMetrics(state, answer.metrics);
  foldMarks(state, answer);
  foldTraffic(state, answer);
  foldGauges(state, answer);
  foldLogs(state, answer);
  for (const [rank, rows] of Object.entries(answer.verdicts)) state.verdicts.set(Number(rank), rows);
  for (const [rank, peak] of Object.entries(answer.peaks)) state.peaks.set(Number(rank), peak);
  for (const [rank, parts] of Object.entries(answer.memory)) state.memory.set(Number(rank), parts);
  for (const item of answer.dry_runs) state.dryRuns.set(item.rank, item);
  for (const item of answer.standing) {
    foldStanding(state, item);
    foldPlace(state.places, item);
  }
  for (const item of answer.processes) foldProcess(state, item);
  for (const item of answer.checkpoints) state.checkpoints.set(item.step, item);
  state.proof = answer.proof;
  state.progress = answer.progress;
  state.stepTimes = [...answer.step_times];
  state.sampleRates = answer.sample_rates ?? [];
}

function foldMembers(state, answer) {
  for (const { node, after, time, host, lost } of answer.followed) {
    state.members.set(node, { lastId: after, time, host, clock: null, lost, awaitsGapEnd: false });
  }
}

function foldRanks(state, answer) {
  for (const { rank, node, phase, dropped, ran } of answer.ranks) {
    const fresh = { cells: new Map(), exactStep: ran, exactCells: [], baseline: false, time: answer.time };
    state.ranks.set(rank, { node, phase, dropped, ...fresh });
  }
  for (const { rank, cell } of iterateCells(answer.cells)) {
    state.ranks.get(rank).cells.set(cellKey(cell), cell);
  }
  for (const { rank, cell } of iterateCells(answer.exact)) state.ranks.get(rank).exactCells.push(cell);
  const parts = { rank: answer.parts.rank, ...Object.fromEntries(PART_COLUMNS.map((name) => [name, answer.parts[name]])) };
  for (const { rank, step_s, data_s, optimizer_s, exposed, hidden } of iterateRows(parts)) {
    const seconds = { step_s, data: data_s, optimizer: optimizer_s, exposed, hidden };
    if (state.ranks.has(rank)) state.ranks.get(rank).parts = [seconds];
  }
}

function* iterateCells({ keys, ...columns }) {
  for (const { rank, key, ...counted } of iterateRows(columns)) {
    const [phase, op, axis, group_size] = keys[key];
    yield { rank, cell: { phase, op, axis, group_size, ...counted } };
  }
}

function foldCurve(state, answer) {
  state.stride = answer.stride;
  for (const { step, ...point } of iterateRows(answer.curve)) keepStep(state, step, point);
  if (answer.last_loss) recordLoss(state, answer.last_loss.step, answer.last_loss.loss);
}

function foldMarks(state, answer) {
  for (const { time, kind, step, text, value } of iterateRows(answer.marks)) {
    if (kind === "validation") state.evals.set(step, { time, loss: value });
    if (kind === "gap") {
      state.gaps += 1;
      state.whole.hole(time, value);
    }
    if (kind === "fault" && step !== null) recordLoss(state, step, null, text);
    if (MARKS.has(kind)) mark(state, { kind, time, step, text });
  }
  for (const { node, ...item } of answer.starts) foldStart(state, item, node);
}

function foldTraffic(state, answer) {
  const { width_s, start, length, rows } = answer.traffic;
  if (length === 0) return;
  const holes = state.whole.holes;
  const before = state.whole.width;
  Object.assign(state.whole, { width: width_s, start, length });
  state.whole.holes = new Set([...holes].map((bin) => Math.floor((bin * before) / width_s)));
  for (const { rank, axis, op, bytes } of rows) {
    if (!state.whole.rows.has(rank)) state.whole.rows.set(rank, new Map());
    state.whole.rows.get(rank).set(`${axis}/${op}`, [...bytes]);
  }
  // The history has seconds, the page half seconds.
  for (const { second, rank, axis, op, bytes } of iterateRows(answer.recent)) {
    state.recent.add(rank, `${axis}/${op}`, second, bytes / 2);
    state.recent.add(rank, `${axis}/${op}`, second + 0.5, bytes / 2);
  }
}

function foldGauges(state, answer) {
  for (const { node, ...item } of iterateRows(answer.gauges)) foldGauge(state, item, node);
}

function foldLogs(state, answer) {
  const items = [...iterateRows(answer.logs)].sort((one, other) => one.first - other.first);
  for (const { node, ...item } of items) foldLog(state.logs, item, node);
  for (const { node, ...item } of answer.open_logs ?? []) foldLog(state.logs, { ...item, lines: [] }, node);
}
