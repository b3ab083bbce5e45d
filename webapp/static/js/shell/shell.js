// What every page has: the menu of narrow screens, the palette on Ctrl-K, keys, what scrolls.
import "./keys.js";
import "./once.js";
import { palette } from "./palette.js";
import "./scrollers.js";

const menu = document.getElementById("menu");
const nav = document.getElementById("nav");
menu?.addEventListener("click", () => {
  const open = nav.toggleAttribute("data-open");
  menu.setAttribute("aria-expanded", String(open));
});

// What is open beside the page closes when one goes on elsewhere.
const own = document.querySelector(".own");
if (own) {
  document.addEventListener("click", (event) => own.contains(event.target) || own.removeAttribute("open"));
  own.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    own.removeAttribute("open");
    own.querySelector("summary").focus();
  });
}

const opener = document.getElementById("palette-open");
if (opener) {
  const toggle = palette(opener);
  opener.hidden = false;
  opener.addEventListener("click", toggle);
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    if (document.querySelector("dialog[open]:not(.palette)")) return;
    event.preventDefault();
    toggle();
  });
}
