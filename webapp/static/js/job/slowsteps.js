// What differs about steps that were dragged over: which part, axis, rank and host took longer than in the others.
import { el } from "../dom.js";
import { duration, integer } from "../format.js";

const MOST = 4; // findings
const percent = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(0)} %`;

/** A finding in words. */
export function words({ part, axis, rank, host, seconds, usual_s, ranks_alike }) {
  const what = axis ? `waiting for ${axis}` : part;
  const who = rank === null ? "on every rank alike" : `most on rank ${rank}${host ? ` (${host})` : ""}${ranks_alike ? `, and ${ranks_alike} more` : ""}`;
  const share = usual_s > 0 ? ` (${percent(seconds / usual_s - 1)})` : "";
  return `${what}: ${duration(seconds)} in place of ${duration(usual_s)}${share}, ${who}`;
}

/** A collective that took longer, in words. */
export function callWords({ op, axis, ranks, ended_s, usual_s, last, host }) {
  const who = last === null ? "" : `; rank ${last}${host ? ` (${host})` : ""} came last to most of them`;
  return `${op.replaceAll("_", "-")} over ${axis} of ranks ${ranks.join(", ")}: ${duration(ended_s)} in place of ${duration(usual_s)}${who}`;
}

/** The paragraph about a job's steps from `from` to `to`, filled in when the answer comes. */
export function slowSteps(job, from, to) {
  const title = `${job.letter ? `${job.letter}: ` : ""}steps ${integer(from)} to ${integer(to)}`;
  const told = el("p", { className: "note", role: "status" }, "Looking…");
  const box = el("div", {}, el("b", {}, title), told);
  if (to < from) told.textContent = "No whole step lies in there.";
  else ask(job, from, to).then((lines) => told.replaceWith(lines));
  return box;
}

/** First and last of the steps whose ends lie from `from` to `to`, unix seconds; null where none do. `curve`: {step, time}. */
export function stepsWithin(curve, from, to) {
  const within = curve.step.filter((_, index) => curve.time[index] >= from && curve.time[index] <= to);
  return within.length > 0 ? [within[0], within.at(-1)] : null;
}

/** Offers it of the stretch that the job page's charts show, once somebody dragged over one. */
export function slowStretch(place, page, jobOf) {
  const { view } = page;
  let offered = ""; // a cursor that moves takes no answer away
  view.subscribe(() => {
    const { from, to } = view.now;
    const steps = from === null ? null : stepsWithin(page.curve, from, to);
    place.hidden = steps === null;
    if (String(steps) === offered) return;
    offered = String(steps);
    if (!steps) return;
    const [first, last] = steps;
    const button = el("button", { type: "button", className: "button small" }, `What differs about steps ${integer(first)} to ${integer(last)}?`);
    button.addEventListener("click", () => place.replaceChildren(slowSteps(jobOf(), first, last)));
    place.replaceChildren(button);
  });
}

async function ask(job, from, to) {
  try {
    const query = new URLSearchParams({ from, to, attempt: job.attempt });
    const answer = await fetch(`/jobs/${job.id}/history/steps/slow/?${query}`, { headers: { Accept: "application/json" } });
    const made = await answer.json();
    if (!answer.ok) throw new Error(made.errors.map(({ message }) => message).join("; "));
    return lines(made);
  } catch (error) {
    return el("p", { className: "note", role: "status" }, `Nothing can be said: ${error.message}.`);
  }
}

function lines({ steps, others, step_s, usual_s, findings, calls }) {
  const head = `${duration(step_s)} a step over ${integer(steps)}, ${duration(usual_s)} over the other ${integer(others)} (${percent(step_s / usual_s - 1)}).`;
  const found = [...findings.slice(0, MOST).map(words), ...calls.slice(0, MOST).map(callWords)];
  const body = found.length ? el("ul", {}, ...found.map((line) => el("li", {}, line))) : el("p", {}, "No part of them differs by more than a tenth.");
  return el("div", { role: "status" }, el("p", {}, head), body);
}
