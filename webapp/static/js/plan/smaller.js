// Asks which layout fits the hosts that are left, and offers to run in it.
import { el } from "../dom.js";
import { duration } from "../format.js";
import { fetchPatiently } from "../refusal.js";

const panel = document.getElementById("smaller");
const place = document.getElementById("smaller-answer");
const form = document.getElementById("smaller-form");
const button = panel.querySelector("button[type=button]");
const mayChange = document.getElementById("requeue-form").dataset.mayNot === undefined;

/** What is offered, in words. */
export function words(offer) {
  const before = offer.was_step_s ? `; as planned, a step of its own layout took ${duration(offer.was_step_s)}` : "";
  const from = offer.checkpoint ? `It goes on from ${offer.checkpoint}, resharded.` : "There is no checkpoint: it begins anew.";
  return [
    `${offer.why}.`,
    `${offer.words} on ${offer.ranks} ${offer.ranks === 1 ? "rank" : "ranks"}: ${duration(offer.step_s)} a step, predicted${before}.`,
    from,
  ];
}

button.addEventListener("click", async () => {
  button.disabled = true;
  try {
    const answer = await fetchPatiently(panel.dataset.url, { headers: { Accept: "application/json" } });
    const told = await answer.json();
    const lines = answer.ok ? words(told) : told.errors.map(({ message }) => message);
    place.replaceChildren(...lines.map((line) => el("p", {}, line)));
    form.hidden = !answer.ok || !mayChange;
  } catch (error) {
    place.replaceChildren(el("p", {}, `Nothing was found: ${error.message}.`));
  } finally {
    button.disabled = false;
  }
});
