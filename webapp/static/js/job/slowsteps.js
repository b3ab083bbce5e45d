// The differences between selected steps and the other steps, by part, axis, rank and host.
import { el } from "../dom.js";
import { duration, integer } from "../format.js";
import { failed } from "../refusal.js";

const MOST = 4; // findings
const percent = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(0)}%`;

/** Describe a finding. */
export function words({ part, axis, rank, host, seconds, usual_s, ranks_alike }) {
  const what = axis ? `waiting for ${axis}` : part;
  const who = rank === null ? "on all ranks" : `most on rank ${rank}${host ? ` (${host})` : ""}${ranks_alike ? `, and ${ranks_alike} more` : ""}`;
  const share = usual_s > 0 ? ` (${percent(seconds / usual_s - 1)})` : "";
  return `${what}: ${duration(seconds)} instead of ${duration(usual_s)}${share}, ${who}`;
}

/** Describe a slower collective. */
export function callWords({ op, axis, ranks, ended_s, usual_s, last, host }) {
  const who = last === null ? "" : `, mostly last: rank ${last}${host ? ` (${host})` : ""}`;
  return `${op.replaceAll("_", "-")} over ${axis} of ranks ${ranks.join(", ")}: ${duration(ended_s)} instead of ${duration(usual_s)}${who}`;
}

/** A paragraph about steps `from` to `to` of a job. The answer of the board fills it. */
export function slowSteps(job, from, to) {
  const title = `${job.letter ? `${job.letter}: ` : ""}steps ${integer(from)} to ${integer(to)}`;
  const status = el("p", { className: "note", role: "status" }, "Loading…");
  const box = el("div", {}, el("b", {}, title), status);
  if (to < from) status.textContent = "The selected time range contains no complete step.";
  else ask(job, from, to).then((lines) => status.replaceWith(lines));
  return box;
}

/** First and last step that ends between `from` and `to` (unix seconds), or null. `curve`: {step, time}. */
export function stepsWithin(curve, from, to) {
  const within = curve.step.filter((_, index) => curve.time[index] >= from && curve.time[index] <= to);
  return within.length > 0 ? [within[0], within.at(-1)] : null;
}

/** Offer the comparison after the reader zooms the charts. */
export function slowStretch(place, page, getJob) {
  const { view } = page;
  let offered = ""; // keeps the answer while the cursor moves
  view.subscribe(() => {
    const { from, to } = view.now;
    const steps = from === null ? null : stepsWithin(page.curve, from, to);
    place.hidden = steps === null;
    if (String(steps) === offered) return;
    offered = String(steps);
    if (!steps) return;
    const [first, last] = steps;
    const button = el("button", { type: "button", className: "button small" }, `Compare steps ${integer(first)} to ${integer(last)}`);
    button.addEventListener("click", () => place.replaceChildren(slowSteps(getJob(), first, last)));
    place.replaceChildren(button);
  });
}

async function ask(job, from, to) {
  try {
    const query = new URLSearchParams({ from, to, attempt: job.attempt });
    const answer = await fetch(`/jobs/${job.id}/history/steps/slow/?${query}`, { headers: { Accept: "application/json" } });
    const made = await answer.json();
    if (!answer.ok) throw new Error(made.errors.map(({ message }) => message).join(" "));
    return lines(made);
  } catch (error) {
    return el("p", { className: "note", role: "status" }, failed("No comparison", error.message));
  }
}

function lines({ steps, others, step_s, usual_s, findings, calls }) {
  const head = `${duration(step_s)} per step in ${integer(steps)} selected steps, ${duration(usual_s)} in ${integer(others)} other steps (${percent(step_s / usual_s - 1)}).`;
  const found = [...findings.slice(0, MOST).map(words), ...calls.slice(0, MOST).map(callWords)];
  const body = found.length ? el("ul", {}, ...found.map((line) => el("li", {}, line))) : el("p", {}, "No part of the step time differs by more than 10% between the selected steps and the other steps.");
  return el("div", { role: "status" }, el("p", {}, head), body);
}
