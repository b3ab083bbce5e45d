// Finds a smaller layout that fits the connected hosts, and offers to run it.
import { el } from "../dom.js";
import { counted, duration } from "../format.js";
import { failed, fetchPatiently } from "../refusal.js";

const panel = document.getElementById("smaller");
const place = document.getElementById("smaller-answer");
const form = document.getElementById("smaller-form");
const button = panel.querySelector("button[type=button]");
const mayChange = document.getElementById("requeue-form").dataset.mayNot === undefined;

/** Describe the offer. */
export function words(offer) {
  const before = offer.was_step_s ? ` The old layout had a planned step time of ${duration(offer.was_step_s)}.` : "";
  const from = offer.checkpoint ? `The run resumes from ${offer.checkpoint} with a new layout.` : "No checkpoint exists, so the run starts at step 0.";
  return [
    `${offer.why}.`,
    `${offer.words} on ${counted(offer.ranks, "rank")}: predicted step time ${duration(offer.step_s)}.${before}`,
    from,
  ];
}

button.addEventListener("click", async () => {
  button.disabled = true;
  try {
    const answer = await fetchPatiently(panel.dataset.url, { headers: { Accept: "application/json" } });
    const body = await answer.json();
    const lines = answer.ok ? words(body) : body.errors.map(({ message }) => message);
    place.replaceChildren(...lines.map((line) => el("p", {}, line)));
    form.hidden = !answer.ok || !mayChange;
  } catch (error) {
    place.replaceChildren(el("p", {}, failed("No layout found", error.message)));
  } finally {
    button.disabled = false;
  }
});
