// The panel (or page) of a step's timeline: which step, its picture, its tables, its downloads.
import { el } from "../dom.js";
import { counted, integer, milliseconds } from "../format.js";
import { MOST_STEPS, stepsAtHand } from "./fold.js";
import { stepOfItems, stepOfTables } from "./step.js";
import { bubbleWords, showCollectiveTimes, showGroups, showOverlap } from "./tables.js";
import { timelineView } from "./view.js";

const NEWEST = "";
const ASK_AGAIN_MS = 10_000; // for what did not come

/** How far clocks, each held against the board's, may be off one another: two hosts' errors may point apart. */
export function clockWords(clocks) {
  const unknown = clocks.filter((clock) => !clock).length;
  if (unknown > 0) return `Of ${counted(unknown, "host")} it is not known how far the clock is off the others'.`;
  const [most, next] = clocks.map((clock) => clock.within_s).sort((a, b) => b - a);
  return `Clocks of hosts agree within ${milliseconds(most + next)}.`;
}

/**
 * Returns show(job, state): follows the newest step until another one is chosen. It tells which it drew: null for none,
 * undefined while the history is asked, after whose answer it calls `again`.
 */
export function timelinePanel(panel, links, again) {
  const $ = (id) => panel.querySelector(`#${id}`);
  const select = $("timeline-step");
  const view = timelineView($("step-timeline"));
  let [shown, job, state] = ["", null, null];
  const made = new Map(); // step -> {told, step}: a step is put together once for as many ranks as told of it

  const kept = { attempt: null, finished: false, steps: null }; // of the history: those that the page did not hear itself
  const fetched = new Map(); // step -> it; undefined while it is on its way, null if it did not come, for a while

  async function ask(path) {
    try {
      const answer = await fetch(`${panel.dataset.trace}${path}`);
      return answer.ok ? await answer.json() : null;
    } catch {
      return null; // the page goes on with what it has
    }
  }

  async function listKept() {
    const { attempt, finished } = job;
    if (kept.attempt === attempt && kept.finished === finished) return;
    if (kept.attempt !== attempt) {
      kept.steps = null;
      fetched.clear();
    }
    Object.assign(kept, { attempt, finished });
    const told = await ask(`/steps?attempt=${attempt}`);
    if (!told) askAgain(() => (kept.finished = null));
    kept.steps = told?.steps ?? kept.steps ?? [];
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
    const told = await ask(`?step=${number}&attempt=${job.attempt}&format=columns`);
    fetched.set(number, told && stepOfTables(number, told.calls.columns, told.spans.columns));
    if (!told) askAgain(() => fetched.delete(number));
    while (fetched.size > MOST_STEPS) fetched.delete(fetched.keys().next().value);
    again();
  }

  function assembled(number) {
    const told = state.timelines?.get(number);
    if (!told) {
      fetchStep(number);
      return fetched.get(number);
    }
    const known = made.get(number);
    if (known?.told === told && known.ranks === told.size) return known.step;
    const step = stepOfItems(number, told, (node) => state.members.get(node)?.clock?.offset_s ?? 0);
    made.set(number, { told, ranks: told.size, step });
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
    listKept();
    const heard = stepsAtHand(state);
    const older = (kept.steps ?? []).filter((step) => !state.timelines?.has(step)).map((step) => ({ step, ranks: null }));
    const steps = [...heard, ...older].sort((a, b) => b.step - a.step);
    const running = !job.finished;
    $("timeline-ask").hidden = !running;
    panel.querySelector("[data-empty]").hidden = steps.length > 0;
    if (steps.length === 0) return kept.steps ? null : undefined;
    listSteps(steps);
    // The newest that all ranks told of: one that is still coming in would jump.
    const most = Math.max(...heard.map(({ ranks }) => ranks));
    const newest = heard.find(({ ranks }) => ranks === most) ?? steps[0];
    const wanted = select.value === NEWEST ? newest.step : Number(select.value);
    const step = assembled(wanted);
    if (!step) {
      clear(step === undefined ? "Looking…" : `Step ${integer(wanted)} could not be fetched.`);
      return step;
    }
    const key = `${wanted} ${step.ranks.size} ${steps.length} ${job.attempt}`;
    if (key === shown) return step;
    shown = key;
    view.show(step);
    const all = [...new Set([...heard.map((one) => assembled(one.step)), step])];
    panel.querySelector(".timeline-tables").hidden = false;
    showCollectiveTimes($("timeline-collectives"), all);
    showGroups($("timeline-groups"), all, links, job.members);
    showOverlap($("timeline-overlap"), step, job.estimate?.time);
    $("timeline-bubble").textContent = bubbleWords(step, job);
    $("timeline-note").textContent = notes(step).join(" ");
    for (const link of panel.querySelectorAll("[data-format]")) {
      link.hidden = false;
      link.href = `${panel.dataset.trace}?step=${wanted}&attempt=${job.attempt}&format=${link.dataset.format}`;
    }
    return step;
  }

  /** Of the step that is chosen there is nothing to show, and no other's picture stands under its name. */
  function clear(words) {
    shown = "";
    view.show(null);
    for (const part of [panel.querySelector(".timeline-tables"), ...panel.querySelectorAll("[data-format]")]) part.hidden = true;
    if ($("timeline-note").textContent !== words) $("timeline-note").textContent = words;
  }

  function notes(step) {
    const said = [`Step ${integer(step.step)}, ${integer(step.ranks.size)} of ${counted(job.world_size, "rank")}.`];
    if (step.leftOut > 0) said.push(`${counted(step.leftOut, "event")} did not fit and ${step.leftOut === 1 ? "is" : "are"} left out.`);
    if (state.members.size > 1) said.push(clockWords([...state.members.values()].map((member) => member.clock)));
    return said;
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
      const told = await response.json();
      answer.textContent = response.ok ? `Asked for: ${told.steps.map(integer).join(", ")}. A step comes as it ends, or from its hosts' memory.` : told.errors.map(({ message }) => message).join("; ");
    } catch (error) {
      answer.textContent = `Not asked: ${error.message}.`;
    }
  });

  return (nextJob, nextState) => {
    [job, state] = [nextJob, nextState];
    return draw();
  };
}
