// The verdict: what is so, why, and what to do, with the evidence folded away (jobs/diagnosis/shapes.py).
import { el, write } from "../dom.js";

const TONES = { starting: "info", well: "good", notice: "warn", slow: "warn", hung: "bad", failed: "bad" };
const NAMES = {
  starting: "starting",
  well: "healthy",
  notice: "worth a look",
  slow: "slow",
  hung: "hung",
  failed: "failed",
  unmeasured: "not measured",
  cancelled: "cancelled",
};

/** {state, sentence, reason, next, evidence}: the diagnosis, or what is honest where there is none. Pure.
 *  "unmeasured": it ended as it was starting. "cancelled": nothing ailed it, and it did not come to its end either. */
export function verdictOf(job) {
  const told = job.diagnosis;
  const none = { state: "", reason: "", next: "", evidence: [] };
  if (told?.sentence && job.finished && !told.over) return { ...none, sentence: "It has ended; the last word on it is on its way." };
  if (told?.sentence && told.over && told.state === "starting") return { ...told, state: "unmeasured" };
  if (told?.sentence && told.state === "well" && job.status === "cancelled") return { ...told, state: "cancelled" };
  if (told?.sentence) return told;
  if (job.status === "queued") return { ...none, sentence: "Not started yet." };
  if (job.finished) return { ...none, sentence: "No verdict was made of this attempt." };
  return { ...none, sentence: "No verdict yet.", reason: "It is made from the first steps that ended." };
}

/** `showSteps(first, last)` shows a stretch of steps in all charts. */
export function healthView(section, showSteps) {
  const part = (name) => section.querySelector(`[data-${name}]`);
  const [badge, sentence, reason, next, evidence] = ["state", "sentence", "reason", "next", "evidence"].map(part);
  let drawn = "";

  function say(node, text) {
    write(node, text);
    node.closest("div").hidden = !text;
  }

  function line({ text, ranks, steps }) {
    const named = ranks.length > 0 && !/\brank/.test(text) ? ` (${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")})` : "";
    const item = el("li", {}, text + named);
    if (steps.length === 2) {
      const button = el("button", { type: "button", className: "button quiet small" }, `Show steps ${steps[0]}–${steps[1]}`);
      button.addEventListener("click", () => showSteps(...steps));
      item.append(" ", button);
    }
    return item;
  }

  return (job) => {
    const told = verdictOf(job);
    const key = JSON.stringify([told.state, told.sentence, told.reason, told.next, told.evidence]);
    if (key === drawn) return;
    drawn = key;
    section.dataset.tone = TONES[told.state] ?? "";
    badge.hidden = !told.state;
    badge.dataset.tone = TONES[told.state] ?? "";
    badge.textContent = NAMES[told.state] ?? told.state;
    write(sentence, told.sentence);
    say(reason, told.reason);
    say(next, told.next);
    evidence.hidden = told.evidence.length === 0;
    evidence.querySelector("summary").textContent = `Evidence: ${told.evidence.length} ${told.evidence.length === 1 ? "fact" : "facts"}`;
    evidence.querySelector("ul").replaceChildren(...told.evidence.map(line));
  };
}
