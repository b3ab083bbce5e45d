// Keys of a page: what a module adds, what elements carry as data-key, and "g" with a letter for the pages.
import { el } from "../dom.js";

const TYPING = "input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]";
const GO_MS = 1500;
const groups = [];
let goingUntil = 0;

/** keys: [{key, words, run}], told of under `title` in the sheet that "?" opens; without run, what has the focus takes them. */
export function addKeys(title, keys) {
  groups.push({ title, keys });
}

/** Elements that do something, shown and enabled. */
export function usable(selector) {
  return [...document.querySelectorAll(selector)].filter((node) => !node.disabled && node.checkVisibility());
}

/** What an element does, in words. */
export function wordsOf(node) {
  return node.dataset.command ?? node.getAttribute("aria-label") ?? node.textContent.trim().replaceAll(/\s+/g, " ");
}

/** As a click does it; what is written in takes the focus. */
export function use(node) {
  if (node.matches(TYPING)) node.focus();
  else node.click();
}

function sheet() {
  const lines = (keys) => keys.flatMap(({ key, words }) => [el("dt", {}, ...key.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, words)]);
  const onPage = usable("[data-key]").map((node) => ({ key: node.dataset.key, words: wordsOf(node) }));
  const pages = [...document.querySelectorAll("[data-go]")].map((node) => ({ key: `g ${node.dataset.go}`, words: wordsOf(node) }));
  const everywhere = [
    ...(document.getElementById("palette-open") ? [{ key: "Ctrl+K", words: "Find a job, host, project, page or action" }] : []),
    { key: "?", words: "This sheet" },
  ];
  const all = [{ title: "Everywhere", keys: everywhere }, ...groups, { title: "On this page", keys: onPage }, { title: "Pages", keys: pages }];
  const close = el("button", { className: "button quiet small", type: "button" }, "Close");
  const dialog = el(
    "dialog",
    { className: "keys", ariaLabel: "Keys" },
    el("header", {}, el("h2", {}, "Keys"), close),
    ...all.filter(({ keys }) => keys.length > 0).flatMap(({ title, keys }) => [el("h3", {}, title), el("dl", {}, ...lines(keys))]),
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  return dialog;
}

/** Shows every key that does something here. */
export function showKeys() {
  const dialog = sheet();
  document.body.append(dialog);
  dialog.showModal();
}

function found(key) {
  if (performance.now() < goingUntil) {
    goingUntil = 0;
    const link = document.querySelector(`[data-go="${CSS.escape(key)}"]`);
    return link && (() => link.click());
  }
  if (key === "?") return showKeys;
  if (key === "g") return () => (goingUntil = performance.now() + GO_MS);
  const own = groups.flatMap(({ keys }) => keys).find((each) => each.key === key);
  if (own) return own.run;
  const [node] = usable(`[data-key="${CSS.escape(key)}"]`);
  return node && (() => use(node));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest?.(TYPING) || document.querySelector("dialog[open]")) return;
  const run = found(event.key);
  if (!run) return;
  event.preventDefault();
  run();
});
