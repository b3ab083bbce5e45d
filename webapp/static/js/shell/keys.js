// Handles keyboard shortcuts: keys that modules add, keys in data-key, and "g" plus a letter for pages.
import { el } from "../dom.js";

const TYPING = "input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]";
const GO_MS = 1500;
const groups = [];
let goingUntil = 0;

/** Adds keys [{key, words, run}] under `title` in the list that "?" opens. The focused element handles a key without run. */
export function addKeys(title, keys) {
  groups.push({ title, keys });
}

/** Returns the visible and enabled elements. */
export function usable(selector) {
  return [...document.querySelectorAll(selector)].filter((node) => !node.disabled && node.checkVisibility());
}

/** Returns the label of an element's action. */
export function getWords(node) {
  return node.dataset.command ?? node.getAttribute("aria-label") ?? node.textContent.trim().replaceAll(/\s+/g, " ");
}

/** Clicks the element, or focuses a text field. */
export function use(node) {
  if (node.matches(TYPING)) node.focus();
  else node.click();
}

function sheet() {
  const lines = (keys) => keys.flatMap(({ key, words }) => [el("dt", {}, ...key.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, words)]);
  const onPage = usable("[data-key]").map((node) => ({ key: node.dataset.key, words: getWords(node) }));
  const pages = [...document.querySelectorAll("[data-go]")].map((node) => ({ key: `g ${node.dataset.go}`, words: getWords(node) }));
  const everywhere = [
    ...(document.getElementById("palette-open") ? [{ key: "Ctrl+K", words: "Find a job, host, project, page, or action" }] : []),
    { key: "?", words: "Show keyboard shortcuts" },
  ];
  const all = [{ title: "Everywhere", keys: everywhere }, ...groups, { title: "On this page", keys: onPage }, { title: "Pages", keys: pages }];
  const close = el("button", { className: "button quiet small", type: "button" }, "Close");
  const dialog = el(
    "dialog",
    { className: "keys", ariaLabel: "Keyboard shortcuts" },
    el("header", {}, el("h2", {}, "Keyboard shortcuts"), close),
    ...all.filter(({ keys }) => keys.length > 0).flatMap(({ title, keys }) => [el("h3", {}, title), el("dl", {}, ...lines(keys))]),
  );
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  return dialog;
}

/** Shows the keyboard shortcuts of the page. */
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
  const { target } = event;
  if ((target instanceof Element && target.closest(TYPING)) || document.querySelector("dialog[open]")) return;
  const run = found(event.key);
  if (!run) return;
  event.preventDefault();
  run();
});
