// The bar that sticks: a way to every panel of the page, and the time range of all charts.
import { el } from "../dom.js";
import { momentWords } from "../charts/moment.js";
import { exactTime } from "../format.js";

export function jumpBar(bar, board) {
  const list = bar.querySelector("ol");
  const panels = [...board.querySelectorAll(":scope > section[id][data-jump]")];
  const links = panels.map((panel) => el("a", { href: `#${panel.id}` }, panel.dataset.jump));
  list.replaceChildren(...links.map((link) => el("li", {}, link)));
  const onScreen = new Set();
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) onScreen.add(target);
        else onScreen.delete(target);
      }
      const first = panels.find((panel) => onScreen.has(panel));
      links.forEach((link, index) => link.setAttribute("aria-current", String(panels[index] === first)));
    },
    { rootMargin: "-88px 0px -60% 0px" },
  );
  for (const panel of panels) watch.observe(panel);
  const show = () => panels.forEach((panel, index) => (links[index].parentElement.hidden = !panel.checkVisibility()));
  show();
  return show;
}

/** The choices of a time range, and what is told of it: whether it is zoomed, and where the cursor is pinned. */
export function rangeBar(bar, page) {
  const { view } = page;
  const radios = [...bar.querySelectorAll("[name=range]")];
  const told = bar.querySelector("[data-told]");
  const reset = bar.querySelector("[data-reset]");
  for (const radio of radios) radio.addEventListener("change", () => view.follow(radio.value === "whole" ? null : Number(radio.value)));
  reset.addEventListener("click", view.reset);

  function show() {
    const { from, to, last, at } = view.now;
    for (const radio of radios) radio.checked = from === null && (radio.value === "whole" ? last === null : Number(radio.value) === last);
    reset.hidden = from === null && at === null;
    const words = at !== null ? momentWords(at, page) : from !== null ? `${exactTime(new Date(from * 1000))} to ${exactTime(new Date(to * 1000))}` : "";
    if (told.textContent !== words) [told.textContent, told.title] = [words, words];
  }

  view.subscribe(show);
  return show;
}
