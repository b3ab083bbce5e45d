// The time range of all charts.
import { momentWords } from "../charts/moment.js";
import { exactTime } from "../format.js";

/** Show the chosen range, the zoom, and the pinned cursor. */
export function rangeBar(bar, page) {
  const { view } = page;
  const radios = [...bar.querySelectorAll("[name=range]")];
  const output = bar.querySelector("[data-words]");
  const reset = bar.querySelector("[data-reset]");
  for (const radio of radios) radio.addEventListener("change", () => view.follow(radio.value === "whole" ? null : Number(radio.value)));
  reset.addEventListener("click", view.reset);

  function show() {
    const { from, to, last, at } = view.now;
    for (const radio of radios) radio.checked = from === null && (radio.value === "whole" ? last === null : Number(radio.value) === last);
    reset.hidden = from === null && at === null;
    const words = at !== null ? momentWords(at, page) : from !== null ? `${exactTime(new Date(from * 1000))} to ${exactTime(new Date(to * 1000))}` : "";
    if (output.textContent !== words) [output.textContent, output.title] = [words, words];
  }

  view.subscribe(show);
  return show;
}
