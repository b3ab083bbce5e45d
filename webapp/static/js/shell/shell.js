// Starts the parts of every page: menu, command palette, keys, and scrolling boxes.
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

// Open menus close on a click outside or on Escape.
for (const opened of document.querySelectorAll("details:is(.own, .columns)")) {
  document.addEventListener("click", (event) => opened.contains(event.target) || opened.removeAttribute("open"));
  opened.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    opened.removeAttribute("open");
    opened.querySelector("summary").focus();
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
