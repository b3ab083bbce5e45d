// The step time of the job page: the median of the last steps, with its spread. Pure.
import { counted, duration } from "../format.js";

const FIRST_STEPS = 3; // warm-up steps, see contracts/telemetry/items.py
const SPREAD = [0.1, 0.9]; // quantiles
const MIN_STEPS_FOR_SPREAD = 5;

/**
 * {step_s, steps, low_s, high_s}, or null before the first step. The summary of an ended run has the median that REST
 * returns. `low_s` and `high_s` are null if too few steps are known.
 */
export function getStepTime(job, state) {
  const summary = job.finished ? (job.exit?.summary?.measured ?? null) : null;
  const recent = lastSteps(state);
  const times = summary ? endOfCurve(state, summary.steps) ?? recent : recent;
  const step_s = summary?.step_s ?? quantile(times, 0.5);
  if (!(step_s > 0)) return null;
  const [low_s, high_s] = times.length < MIN_STEPS_FOR_SPREAD ? [null, null] : SPREAD.map((share) => quantile(times, share));
  return { step_s, steps: summary?.steps ?? times.length, low_s, high_s };
}

/** Describe the step time: "median of 50 steps, 120 to 140 ms". */
export function stepTimeWords({ steps, low_s, high_s }) {
  const median = steps === 1 ? "one step" : `median of ${counted(steps, "step")}`;
  return low_s === null ? median : `${median}, ${rangeWords(low_s, high_s)}`;
}

/** "120 to 140 ms", or "980 ms to 1.02 s". */
function rangeWords(low_s, high_s) {
  const [low, high] = [low_s, high_s].map(duration);
  const unit = high.split(" ").at(-1);
  return low.split(" ").length === 2 && high.split(" ").length === 2 && low.endsWith(` ${unit}`) ? `${low.split(" ")[0]} to ${high}` : `${low} to ${high}`;
}

/** Times of rank 0 without the warm-up steps, unless there are no others. */
function lastSteps({ stepTimes, ranks }) {
  const ran = ranks.get(0)?.exactStep ?? Infinity;
  const warm = Math.max(0, FIRST_STEPS - (ran - stepTimes.length));
  return stepTimes.length > warm ? stepTimes.slice(warm) : stepTimes;
}

function endOfCurve({ steps }, count) {
  const last = Math.max(...steps.keys());
  const times = [...steps].filter(([step, point]) => step > last - count && point.step_s > 0).map(([, point]) => point.step_s);
  return times.length > 0 ? times : null;
}

function quantile(values, share) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const at = share * (sorted.length - 1);
  const below = sorted[Math.floor(at)];
  return below + (at - Math.floor(at)) * (sorted[Math.ceil(at)] - below);
}
