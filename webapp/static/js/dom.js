// Builds DOM nodes from text, without an HTML parser.
import { upright } from "./upright.js";

const WORDS = new Set(["title", "textContent", "ariaLabel", "placeholder", "label", "alt"]); // properties that are read

/** el("td", {className: "number"}, "12") */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, property] of Object.entries(properties)) {
    if (property === undefined || property === null) continue;
    const value = WORDS.has(key) ? upright(String(property)) : property;
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  const shown = children.filter((child) => child !== null && child !== undefined);
  node.append(...shown.map((child) => (typeof child === "string" ? upright(child) : child)));
  return node;
}

/** Set the text of a node, unless the node already has the text. */
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

const CLIPBOARD_MS = 2000; // a click counts as one for some seconds, which copying a selection asks for

/** True when the clipboard took it. A page without https has none to ask, and one may never answer: then by a selection. */
export async function copyText(text) {
  try {
    const silent = new Promise((_, refuse) => setTimeout(refuse, CLIPBOARD_MS));
    await Promise.race([navigator.clipboard.writeText(text), silent]);
    return true;
  } catch {
    return copiedSelected(text);
  }
}

/** Selects it where nobody sees, and leaves focus and selection as they were. */
function copiedSelected(text) {
  /** @type {any} */
  const focused = document.activeElement;
  const selection = /** @type {Selection} */ (getSelection()); // only a hidden frame has none
  const ranges = Array.from({ length: selection.rangeCount }, (_, at) => selection.getRangeAt(at));
  const field = el("textarea", { className: "visually-hidden", readOnly: true, value: text });
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  selection.removeAllRanges();
  ranges.forEach((range) => selection.addRange(range));
  return copied;
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

/** The nodes of a text in which backquotes mark code: withCode("`tp` is 3"). */
export function withCode(text) {
  return text.split("`").map((part, at, all) => (at % 2 === 1 && at < all.length - 1 ? el("code", {}, part) : part));
}
