// The step timeline: choice of the step, picture, tables, downloads.
import { el } from "../dom.js";
import { counted, integer, milliseconds } from "../format.js";
import { MOST_STEPS, stepsAtHand } from "./fold.js";
import { stepOfItems, stepOfTables } from "./step.js";
import { bubbleWords, showCollectiveTimes, showGroups, showOverlap } from "./tables.js";
import { timelineView } from "./view.js";
import { failed } from "../refusal.js";

const NEWEST = "";
const ASK_AGAIN_MS = 10_000; // after a failed request

/** Describe the clock error between hosts. Each clock is compared with the board, so two errors can add up. */
export function clockWords(clocks) {
  const unknown = clocks.filter((clock) => !clock).length;
  if (unknown > 0) return `The clock offset of ${counted(unknown, "host")} is unknown.`;
  const [most, next] = clocks.map((clock) => clock.within_s).sort((a, b) => b - a);
  return `The clocks of the hosts differ by at most ${milliseconds(most + next)}.`;
}

/**
 * Return show(job, state), which draws the latest step until the reader chooses another one. It returns the step that it
 * drew, null for none, or undefined while the history loads. It calls `again` after the history is loaded.
 */
export function timelinePanel(panel, links, again) {
  const $ = (id) => panel.querySelector(`#${id}`);
  const select = $("timeline-step");
  const view = timelineView($("step-timeline"));
  let shown = "";
  /** @type {any} */
  let [job, state] = [null, null];
  const made = new Map(); // step -> {entries, count, step}, built once per number of ranks

  /** @type {{attempt: number | null, finished: boolean | null, steps: any[] | null}} */
  const stored = { attempt: null, finished: false, steps: null }; // steps of the history
  const fetched = new Map(); // number -> step, undefined while it loads, null for a while after a failure

  async function ask(path) {
    try {
      const answer = await fetch(`${panel.dataset.trace}${path}`);
      return answer.ok ? await answer.json() : null;
    } catch {
      return null; // the page keeps its data
    }
  }

  async function listStored() {
    const { attempt, finished } = job;
    if (stored.attempt === attempt && stored.finished === finished) return;
    if (stored.attempt !== attempt) {
      stored.steps = null;
      fetched.clear();
    }
    Object.assign(stored, { attempt, finished });
    const answer = await ask(`/steps?attempt=${attempt}`);
    if (!answer) askAgain(() => (stored.finished = null));
    stored.steps = answer?.steps ?? stored.steps ?? [];
    again();
  }

  function askAgain(forget) {
    setTimeout(() => {
      forget();
      again();
    }, ASK_AGAIN_MS);
  }

  async function fetchStep(number) {
    if (fetched.has(number)) return;
    fetched.set(number, undefined);
    const columns = await ask(`?step=${number}&attempt=${job.attempt}&format=columns`);
    fetched.set(number, columns && stepOfTables(number, columns.calls.columns, columns.spans.columns));
    if (!columns) askAgain(() => fetched.delete(number));
    while (fetched.size > MOST_STEPS) fetched.delete(fetched.keys().next().value);
    again();
  }

  function assembled(number) {
    const ranks = state.timelines?.get(number);
    if (!ranks) {
      fetchStep(number);
      return fetched.get(number);
    }
    const known = made.get(number);
    if (known?.entries === ranks && known.count === ranks.size) return known.step;
    const step = stepOfItems(number, ranks, (node) => state.members.get(node)?.clock?.offset_s ?? 0);
    made.set(number, { entries: ranks, count: ranks.size, step });
    for (const one of made.keys()) if (!state.timelines.has(one)) made.delete(one);
    return step;
  }

  function listSteps(steps) {
    const known = [...select.options].slice(1).map((option) => option.textContent);
    const words = steps.map(({ step, ranks }) => `step ${integer(step)}${ranks === null ? "" : `, ${integer(ranks)} ${ranks === 1 ? "rank" : "ranks"}`}`);
    if (known.join() === words.join()) return;
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...steps.map(({ step }, i) => el("option", { value: String(step) }, words[i])));
    select.value = steps.some(({ step }) => String(step) === chosen) ? chosen : NEWEST;
  }

  function draw() {
    listStored();
    const live = stepsAtHand(state);
    const older = (stored.steps ?? []).filter((step) => !state.timelines?.has(step)).map((step) => ({ step, ranks: null }));
    const steps = [...live, ...older].sort((a, b) => b.step - a.step);
    const running = !job.finished;
    $("timeline-ask").hidden = !running;
    panel.querySelector("[data-empty]").hidden = steps.length > 0;
    if (steps.length === 0) return stored.steps ? null : undefined;
    listSteps(steps);
    // The latest step of all ranks, because a step that still arrives changes with each rank.
    const most = Math.max(...live.map(({ ranks }) => ranks));
    const newest = live.find(({ ranks }) => ranks === most) ?? steps[0];
    const wanted = select.value === NEWEST ? newest.step : Number(select.value);
    const step = assembled(wanted);
    if (!step) {
      clear(step === undefined ? "Loading…" : `Step ${integer(wanted)} did not load.`);
      return step;
    }
    const key = `${wanted} ${step.ranks.size} ${job.attempt}`;
    if (key === shown) return step;
    shown = key;
    view.show(step);
    panel.querySelector(".timeline-tables").hidden = false;
    showCollectiveTimes($("timeline-collectives"), step);
    showGroups($("timeline-groups"), step, links, job.members);
    showOverlap($("timeline-overlap"), step, job.estimate?.time);
    $("timeline-bubble").textContent = bubbleWords(step, job);
    $("timeline-note").textContent = notes(step).join(" ");
    for (const link of panel.querySelectorAll("[data-format]")) {
      link.hidden = false;
      link.href = `${panel.dataset.trace}?step=${wanted}&attempt=${job.attempt}&format=${link.dataset.format}`;
    }
    return step;
  }

  /** Hide the picture of the previous step, and show `words`. */
  function clear(words) {
    shown = "";
    view.show(null);
    for (const part of [panel.querySelector(".timeline-tables"), ...panel.querySelectorAll("[data-format]")]) part.hidden = true;
    if ($("timeline-note").textContent !== words) $("timeline-note").textContent = words;
  }

  function notes(step) {
    const sentences = [`Step ${integer(step.step)}, ${integer(step.ranks.size)} of ${counted(job.world_size, "rank")}.`];
    if (step.leftOut > 0) sentences.push(`${counted(step.leftOut, "event")} ${step.leftOut === 1 ? "is" : "are"} missing, because the step has more events than the limit.`);
    if (state.members.size > 1) sentences.push(clockWords([...state.members.values()].map((member) => member.clock)));
    return sentences;
  }

  select.addEventListener("change", () => job && draw());
  $("timeline-ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    const answer = form.querySelector("output");
    const step = Number($("timeline-wanted").value);
    try {
      const headers = { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
      const response = await fetch(panel.dataset.trace, { method: "POST", headers, body: JSON.stringify({ step }) });
      const body = await response.json();
      answer.textContent = response.ok ? `Tracing ${body.steps.length === 1 ? "step" : "steps"} ${body.steps.map(integer).join(", ")}. The timeline appears after the traced step ends.` : body.errors.map(({ message }) => message).join("; ");
    } catch (error) {
      answer.textContent = failed("Not traced", error.message);
    }
  });

  return (nextJob, nextState) => {
    [job, state] = [nextJob, nextState];
    return draw();
  };
}
