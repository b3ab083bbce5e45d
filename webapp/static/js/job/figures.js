// Progress: how far, how fast, how long still, and whether what is sent is as planned.
import { bytes, duration, exactBytes, integer, loss, tokenRate } from "../format.js";
import { SPEEDS } from "../fold/steps.js";
import { secondsLeft } from "../store.js";

const $ = (id) => document.getElementById(id);

/** Where there is too little room for all of it, the rest is in its title. */
function put(id, words) {
  const place = $(id);
  if (place.textContent !== words) [place.textContent, place.title] = [words, words];
}

function newest(points) {
  const step = Math.max(...points.keys());
  return { step, loss: points.get(step).loss };
}

/** What is kept of an ended run wins: it is the figure that REST tells, and that runs are compared by. */
export function speedOf(job, state) {
  const summary = job.finished ? job.exit?.summary : null;
  const rate = summary?.tokens_per_s ?? state.progress.rate;
  if (!(rate > 0)) return { rate: tokenRate(null), note: "" };
  const steps = summary?.tokens_per_s ? Math.min(SPEEDS, summary.ran_steps ?? summary.steps) : Math.min(SPEEDS, Math.max(1, state.stepTimes.length));
  const tokens = state.progress.tokens ?? job.estimate?.tokens_per_step;
  const each = tokens ? `${duration(tokens / rate)} a step, ` : "";
  return { rate: tokenRate(rate), note: `${each}${steps === 1 ? "of one step" : `mean of ${steps}`}` };
}

export function showProgress(job, state) {
  const { progress } = state;
  if (state.lastLoss) put("figure-loss", state.lastLoss.words ?? loss(state.lastLoss.loss));
  if (state.evals.size > 0) {
    const last = newest(state.evals);
    put("figure-eval", loss(last.loss));
    put("figure-eval-step", `after step ${integer(last.step)}`);
  }
  const phases = new Set([...state.ranks.values()].map((rank) => rank.phase).filter(Boolean));
  const phase = phases.size > 0 && !job.finished ? `now: ${[...phases].join(", ")}` : "";
  const silent = job.members.filter((member) => member.silent).map((member) => member.host);
  const unheard = job.status === "unreachable" || silent.length > 0;
  const whom = silent.length > 2 ? `${integer(silent.length)} hosts` : silent.join(", ") || "its host";
  put("figure-phase", unheard ? `not heard: ${whom}` : phase);
  if (!progress) return;
  const steps = progress.steps ?? job.spec.train.steps;
  put("figure-step", `${integer(progress.step)} of ${integer(steps)}`);
  $("progress").value = progress.step;
  $("progress").max = steps;
  const speed = speedOf(job, state);
  put("figure-rate", speed.rate);
  put("figure-step-time", speed.note);
  put("figure-left", job.finished || unheard ? "–" : duration(secondsLeft(progress)));
}

/** `off`: {bytesOff, callsOff} or null before anything was compared. */
export function showOff(off, exact) {
  const place = $("figure-off");
  if (!place || off === null) return;
  const amount = exact ? off.bytesOff : off.net;
  place.textContent = amount < 1e7 ? exactBytes(amount) : bytes(amount);
  place.title = exactBytes(amount);
  place.dataset.tone = amount === 0 && off.callsOff === 0 ? "good" : "bad";
  put("figure-off-calls", `${integer(off.callsOff)} ${off.callsOff === 1 ? "call" : "calls"} off`);
}

/** Of a script: how many optimiser steps ended, where that was told; else whether any did. */
export function showStepsSeen(place, job, state) {
  const steps = Math.max(state.progress?.step ?? 0, job.exit?.summary?.steps ?? 0);
  const some = [...state.ranks.values()].some((rank) => [...rank.cells.values()].some((cell) => cell.phase === "step"));
  if (steps > 0) place.textContent = `${integer(steps)} optimiser ${steps === 1 ? "step" : "steps"} seen`;
  else if (some) place.textContent = "optimiser steps seen";
  else place.textContent = job.finished ? "no optimiser step seen" : "no optimiser step seen yet";
}
