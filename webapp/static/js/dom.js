// Building DOM from text: nothing here ever parses HTML.
import { upright } from "./upright.js";

const WORDS = new Set(["title", "textContent", "ariaLabel", "placeholder", "label", "alt"]); // properties that are read

/** el("td", {className: "number"}, "12") */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, given] of Object.entries(properties)) {
    if (given === undefined || given === null) continue;
    const value = WORDS.has(key) ? upright(String(given)) : given;
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  const shown = children.filter((child) => child !== null && child !== undefined);
  node.append(...shown.map((child) => (typeof child === "string" ? upright(child) : child)));
  return node;
}

/** Other people's words as a node's text; one that says so already is left alone. */
export function write(node, text) {
  const shown = upright(text);
  if (node.textContent !== shown) node.textContent = shown;
}

/** A small square of a token's colour: swatch("--axis-dp"). */
export function swatch(token) {
  const square = el("span", { className: "swatch", ariaHidden: "true" });
  square.style.setProperty("--swatch", `var(${token})`);
  return square;
}

/** An entry of a legend: a colour and what it stands for, never parted by the end of a line. */
export function legendEntry(token, words) {
  return el("span", {}, swatch(token), words);
}

/** A stacked bar of parts [{token, value, title}]. */
export function stackedBar(parts, label) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const bar = el("div", { className: "bar", role: "img", ariaLabel: label });
  for (const part of parts) {
    if (part.value <= 0) continue;
    const span = el("span", { title: part.title });
    span.style.width = `${(100 * part.value) / total}%`;
    span.style.setProperty("--swatch", `var(${part.token})`);
    bar.append(span);
  }
  return bar;
}

/** An embedded json_script as an object, or null. */
export function embedded(id) {
  const node = document.getElementById(id);
  return node ? JSON.parse(node.textContent) : null;
}

/** True when the clipboard took it: it may be forbidden, or missing without https. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** At most one call a frame, none while the page is hidden; the newest state is drawn. */
export function eachFrame(draw) {
  let wanted = false;
  const run = () => {
    wanted = false;
    draw();
  };
  return () => {
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(run);
  };
}

/** `draw` at once, and then at most every so many milliseconds; the last state is always drawn. */
export function notMoreOftenThan(milliseconds, draw) {
  let timer = null;
  let wanted = false;
  const rest = () => {
    timer = null;
    if (wanted) run();
  };
  const run = () => {
    wanted = false;
    draw();
    timer = setTimeout(rest, milliseconds);
  };
  return () => (timer === null ? run() : (wanted = true));
}
