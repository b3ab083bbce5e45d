// Folds items of training: steps and their parts, validations, checkpoints. Pure.
import { foldCells, rankState } from "./traffic.js";

export const MOST_STEPS = 20_000;
const MOST_CHECKPOINTS = 100; // limit of the server (contracts/telemetry/items.py)
const MOST_MARKS = 2000; // limit of a snapshot (jobs/runs/history/queries/snapshot.py)
const LAST = 50; // steps of the median step time
const FIRST_STEPS = 3; // warm-up steps (contracts/telemetry/items.py)
const TRACED_STEPS = 64; // steps of a diagnosis (jobs/runs/diagnosis/rank_reports.py)
export const SPEEDS = 20; // steps of the speed (SPEED_STEPS, contracts/telemetry/items.py)

/** Add a point of the curves. Above MOST_STEPS keep every second step, then every fourth, and so on. */
export function keepStep(state, step, point) {
  recordLoss(state, step, point.loss);
  if (step % state.stride !== 0) return;
  state.steps.set(step, point);
  if (state.steps.size <= MOST_STEPS) return;
  state.stride *= 2;
  for (const one of state.steps.keys()) if (one % state.stride !== 0) state.steps.delete(one);
}

/** Keep the loss of the latest step. A fault such as "loss is nan" counts as a loss. */
export function recordLoss(state, step, loss, fault = "") {
  const [, words] = /^loss is (\S+)/.exec(fault) ?? [];
  if (step < (state.lastLoss?.step ?? 0)) return;
  if (loss !== null) state.lastLoss = { step, loss };
  else if (words) state.lastLoss = { step, loss, words };
}

/** Merge the items of all ranks into one point, because not every rank has the loss. */
function foldPoint(state, item) {
  const before = state.steps.get(item.step);
  const own = item.rank === 0 || !before ? item : before;
  const getField = (name) => item[name] ?? before?.[name] ?? null;
  keepStep(state, item.step, {
    time: own.time,
    step_s: own.step_s,
    tokens: own.tokens,
    samples: own.samples ?? null,
    loss: getField("loss"),
    grad_norm: getField("grad_norm"),
    learning_rate: getField("learning_rate"),
  });
  if (item.not_finite) recordLoss(state, item.step, item.loss, item.not_finite);
}

function keepLast(list, value, most = LAST) {
  list.push(value);
  if (list.length > most) list.shift();
}

/** Return the time of each step of an item. A step without its own time counts with the mean of the item. */
const listStepTimes = ({ times, step_s, over = 1 }) => times ?? Array(Math.min(over, LAST)).fill(step_s);

/** Return tokens per second over the last steps of rank 0, or of the item. A single step varies too much. */
function speed(state, item) {
  if (item.tokens === null) return null;
  const times = state.stepTimes.length > 0 ? state.stepTimes.slice(-SPEEDS) : [item.step_s];
  const seconds = times.reduce((sum, one) => sum + one, 0);
  return seconds > 0 ? (item.tokens * times.length) / seconds : null;
}

/** Return samples per second over the last items of rank 0 with a known number of samples, or null. */
function sampleSpeed({ sampleRates }) {
  const seconds = sampleRates.reduce((sum, [, one]) => sum + one, 0);
  return seconds > 0 ? sampleRates.reduce((sum, [one]) => sum + one, 0) / seconds : null;
}

export function foldStep(state, item, node) {
  const rank = rankState(state, item.rank, node);
  rank.exactStep = item.counted ?? item.ran;
  rank.exactCells = item.cells;
  foldCells(state, item, node);
  foldPoint(state, item);
  if (item.parts && item.ran > FIRST_STEPS) {
    rank.parts ??= [];
    keepLast(rank.parts, { step_s: item.step_s, data: null, optimizer: null, ...item.parts }, TRACED_STEPS);
  }
  if (item.not_finite) mark(state, { kind: "fault", time: item.time, step: item.step, text: item.not_finite });
  if (item.rank === 0) for (const one of listStepTimes(item)) keepLast(state.stepTimes, one);
  if (item.rank === 0 && item.samples !== undefined) keepLast(state.sampleRates, [item.samples, item.step_s], SPEEDS);
  const [rate, sample_rate] = [speed(state, item), sampleSpeed(state)];
  const before = state.progress;
  if (before) Object.assign(before, { rate, sample_rate });
  if (before && item.step <= before.step) return;
  const { step, steps, step_s, tokens, time, over = 1 } = item;
  state.progress = { step, steps, step_s, tokens, time, rate, sample_rate, over };
  // A first step after step 1 means that the run resumed from a checkpoint.
  if (item.step > item.ran) mark(state, { kind: "resume", time: time - step_s, step: step - item.ran, text: "" });
}

export function foldEval(state, item) {
  state.evals.set(item.step, { time: item.time, loss: item.loss });
  mark(state, { kind: "validation", time: item.time, step: item.step, text: "" });
}

export function foldCheckpoint(state, item) {
  state.checkpoints.set(item.step, item);
  if (state.checkpoints.size > MOST_CHECKPOINTS) state.checkpoints.delete(state.checkpoints.keys().next().value);
  mark(state, { kind: "checkpoint", time: item.time, step: item.step, text: item.problem ?? "" });
}

/** Return whether the previous step was healthy. A run with a NaN loss can continue, and only its first fault is a mark. */
function isFirst(state, step) {
  const before = state.faultyStep;
  state.faultyStep = Math.max(before ?? step, step);
  return before === null || step > before + 1;
}

/** Add a mark for all charts, {kind, time, step, text}, unless it is known. */
export function mark(state, { kind, time, step, text }) {
  if (kind === "fault" && !isFirst(state, step)) return;
  const key = `${kind} ${step}`;
  if (!state.marks.has(key)) state.marks.set(key, { kind, time, step, text });
  if (state.marks.size > MOST_MARKS) state.marks.delete(state.marks.keys().next().value);
}

/** Return the seconds left at the current speed, or null. */
export function secondsLeft(progress) {
  if (!progress?.rate || !progress.tokens || !progress.steps) return null;
  return ((progress.steps - progress.step) * progress.tokens) / progress.rate;
}
