// Progress: steps, time left or duration, step time, speed, loss, and the traffic difference.
import { counted, decimalBytes, duration, exactBytes, integer, loss, sampleRate, tokenRate } from "../format.js";
import { NUMBERED, findLastLoss } from "../fold/metrics.js";
import { SPEEDS } from "../fold/steps.js";
import { secondsLeft } from "../store.js";
import { PHASE_WORDS } from "./places.js";
import { getStepTime, stepTimeWords } from "./steptime.js";

const $ = (id) => document.getElementById(id);

/** The title has the whole text, in case the place cuts it. */
function put(id, words) {
  const place = $(id); // a script has fewer figures
  if (place && place.textContent !== words) [place.textContent, place.title] = [words, words];
}

function newest(points) {
  const step = Math.max(...points.keys());
  return { step, loss: points.get(step).loss };
}

/** The stored speed of an ended run is the one that REST returns and that comparisons use. */
export function getSpeed(job, state) {
  const summary = job.finished ? job.exit?.summary : null;
  const rate = summary?.tokens_per_s ?? state.progress.rate;
  const samples = summary?.samples_per_s ?? state.progress.sample_rate;
  if (!(rate > 0) && samples > 0) return { rate: sampleRate(samples), note: "batches of the DataLoader, or marked" };
  if (!(rate > 0)) return { rate: tokenRate(null), note: "" };
  const steps = summary?.tokens_per_s ? Math.min(SPEEDS, summary.ran_steps ?? summary.steps) : Math.min(SPEEDS, Math.max(1, state.stepTimes.length));
  return { rate: tokenRate(rate), note: steps === 1 ? "one step" : `mean of ${integer(steps)} steps` };
}

/**
 * Seconds from the start of the current attempt to its end, or null.
 * @param {Job} job
 */
export function secondsRun({ history, attempt, finished }) {
  const own = history.filter((change) => change.attempt === attempt);
  const start = own.find((change) => change.status === "starting");
  return finished && start ? (Date.parse(own[own.length - 1].at) - Date.parse(start.at)) / 1000 : null;
}

function phaseWords(job, state) {
  const silent = job.members.filter((member) => member.silent).map((member) => member.host);
  if (job.status === "unreachable" || silent.length > 0) {
    return `no contact with ${silent.length > 2 ? counted(silent.length, "host") : silent.join(", ") || "the host"}`;
  }
  const phases = new Set([...state.ranks.values()].map((rank) => rank.phase).filter(Boolean));
  return phases.size > 0 && !job.finished ? `now ${[...phases].map((phase) => PHASE_WORDS[phase] ?? phase).join(", ")}` : "";
}

/** Whether the live verdict is a stall: no rank makes progress. */
function isStalled({ diagnosis, finished }) {
  return !finished && diagnosis?.state === "hung" && !diagnosis.over;
}

/** Show the last loss of a script. Without its history, show the loss of the stored verdict. */
function showReportedLoss({ diagnosis }, { metrics }) {
  const stored = diagnosis?.loss ? { ...diagnosis.loss, words: diagnosis.loss.not_finite } : null;
  const last = findLastLoss(metrics) ?? stored;
  if (!last) return;
  put("figure-loss", last.words || loss(last.loss));
  put("figure-loss-step", `${last.source === NUMBERED ? "report" : "step"} ${integer(last.step)}`);
}

export function showProgress(job, state) {
  const { progress } = state;
  if (state.lastLoss) put("figure-loss", state.lastLoss.words ?? loss(state.lastLoss.loss));
  showReportedLoss(job, state);
  if (state.evals.size > 0) {
    const last = newest(state.evals);
    put("figure-eval", `validation ${loss(last.loss)}, step ${integer(last.step)}`);
  }
  const phase = phaseWords(job, state);
  const stalled = isStalled(job);
  put("figure-phase", job.finished ? "including start-up" : stalled ? "stalled" : phase);
  put("figure-left-name", job.finished ? "Duration" : "Time left");
  if (job.finished) put("figure-left", duration(secondsRun(job)));
  if (!progress) return;
  const bar = $("progress"); // a script has none, because its number of steps is unknown
  const steps = bar ? progress.steps ?? job.spec.train.steps : null;
  put("figure-step", bar ? `${integer(progress.step)} of ${integer(steps)}` : integer(progress.step));
  if (bar) [bar.max, bar.value] = [steps, progress.step];
  const speed = stalled ? { rate: "–", note: "stalled" } : getSpeed(job, state);
  put("figure-rate", speed.rate);
  put("figure-rate-note", speed.note);
  const step = getStepTime(job, state);
  put("figure-step-time", duration(step?.step_s ?? null));
  put("figure-spread", step ? stepTimeWords(step) : "");
  if (progress.over > 1) put("figure-over", `Short steps: each point is the mean of ${integer(progress.over)} steps.`);
  if (!job.finished) put("figure-left", stalled || phase.startsWith("no contact") ? "–" : duration(secondsLeft(progress)));
}

/** `off` is {bytesOff, callsOff}, or null before the first comparison. */
export function showOff(off, exact) {
  const place = $("figure-off");
  if (!place || off === null) return;
  const amount = exact ? off.bytesOff : off.net;
  place.textContent = amount < 1e7 ? exactBytes(amount) : decimalBytes(amount);
  place.title = exactBytes(amount);
  place.dataset.tone = amount === 0 && off.callsOff === 0 ? "good" : "bad";
  put("figure-off-calls", counted(off.callsOff, "call"));
}

/** Show the number of steps of a script, or whether a step was seen at all. */
export function showStepsSeen(place, job, state) {
  const steps = Math.max(state.progress?.step ?? 0, job.exit?.summary?.steps ?? 0);
  const some = [...state.ranks.values()].some((rank) => [...rank.cells.values()].some((cell) => cell.phase === "step"));
  if (steps > 0) place.textContent = `${counted(steps, "step")} seen`;
  else if (some) place.textContent = "steps seen";
  else place.textContent = job.finished ? "no step seen" : "no step seen yet";
  const hint = $("no-steps"); // how to mark steps
  if (hint) hint.hidden = steps > 0 || some || !(job.finished || state.ranks.size > 0);
}
