// A log line as a terminal shows it, as text and class names. Only colors and weights (SGR) stay. Other sequences are
// removed. This module creates no markup.
import { upright } from "../upright.js";

const ESCAPES = /\u001b(?:\[([0-?]*)([ -/]*[@-~])|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*(?:\u001b\\)?|[ -/]*[0-~])/g;
const CONTROL = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;
const UNSAFE = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/;
const TAB = 8;
const COLORS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];
// The eight colors of xterm, to find the nearest one to an RGB color.
const PARTS = [
  [0, 0, 0],
  [205, 0, 0],
  [0, 205, 0],
  [205, 205, 0],
  [0, 0, 238],
  [205, 0, 205],
  [0, 205, 205],
  [229, 229, 229],
];
const CUBE = [0, 95, 135, 175, 215, 255];

const MOST_STORED = 4096; // characters of a line in the history of older versions

/** Apply carriage returns in a line of an older version: keep only the last complete state of a progress bar. */
function overwritten(text) {
  if (!text.includes("\r")) return text;
  const parts = text.replace(/\r+$/, "").split("\r");
  const isCut = text.length >= MOST_STORED && parts.length > 1;
  return parts[parts.length - (isCut ? 2 : 1)];
}

function tabbed(text) {
  if (!text.includes("\t")) return text;
  let expanded = "";
  for (const part of text.split(/(\t)/)) expanded += part === "\t" ? " ".repeat(TAB - (expanded.length % TAB)) : part;
  return expanded;
}

/** Return the text without sequences and control characters. Tabs become spaces. */
export function plain(words) {
  const text = upright(words);
  if (!UNSAFE.test(text) && !text.includes("\t")) return text;
  return tabbed(overwritten(text).replace(ESCAPES, "").replace(CONTROL, ""));
}

/** Return [{text, classes}]. The joined texts equal `plain(text)`. */
export function segments(words) {
  const text = upright(words);
  if (!text.includes("\u001b")) return [{ text: plain(text), classes: "" }];
  const line = overwritten(text);
  const result = [];
  let style = {};
  let column = 0;
  let at = 0;
  const add = (raw) => {
    let shown = "";
    for (const part of raw.replace(CONTROL, "").split(/(\t)/)) {
      shown += part === "\t" ? " ".repeat(TAB - ((column + shown.length) % TAB)) : part;
    }
    if (!shown) return;
    column += shown.length;
    result.push({ text: shown, classes: getClasses(style) });
  };
  for (const found of line.matchAll(ESCAPES)) {
    add(line.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[2] === "m") style = styled(style, found[1]);
  }
  add(line.slice(at));
  return result.length > 0 ? result : [{ text: "", classes: "" }];
}

function getClasses(style) {
  const names = ["bold", "dim", "italic", "underline", "inverse"].filter((name) => style[name]);
  if (style.ink !== undefined) names.push(`ink-${COLORS[style.ink]}`);
  if (style.ground !== undefined) names.push(`ground-${COLORS[style.ground]}`);
  return names.map((name) => `ansi-${name}`).join(" ");
}

const ON = { 1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse" };
const OFF = { 22: ["bold", "dim"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 39: ["ink"], 49: ["ground"] };

function styled(before, parameters) {
  const codes = parameters.split(/[;:]/).map(Number);
  let style = { ...before };
  for (let i = 0; i < codes.length; i += 1) {
    const code = codes[i];
    if (code === 0) style = {};
    else if (ON[code]) style[ON[code]] = true;
    else if (OFF[code]) for (const name of OFF[code]) delete style[name];
    else if (code === 38 || code === 48) {
      const [found, taken] = extended(codes.slice(i + 1));
      if (found !== null) style[code === 38 ? "ink" : "ground"] = found;
      i += taken;
    } else if (code >= 30 && code <= 37) style.ink = code - 30;
    else if (code >= 90 && code <= 97) style.ink = code - 90;
    else if (code >= 40 && code <= 47) style.ground = code - 40;
    else if (code >= 100 && code <= 107) style.ground = code - 100;
  }
  return style;
}

/**
 * Map an indexed or RGB color to the nearest of the eight theme colors. Return the color and the number of codes read.
 * @param {number[]} codes
 * @returns {[number | null, number]}
 */
function extended(codes) {
  if (codes[0] === 5) return [indexed(codes[1]), 2];
  if (codes[0] === 2) return [nearest(codes.slice(1, 4)), 4];
  return [null, 0];
}

function indexed(index) {
  if (!(index >= 0 && index <= 255)) return null;
  if (index < 16) return index % 8;
  if (index >= 232) return nearest(Array(3).fill(8 + 10 * (index - 232)));
  const place = index - 16;
  return nearest([CUBE[Math.floor(place / 36)], CUBE[Math.floor(place / 6) % 6], CUBE[place % 6]]);
}

function nearest(parts) {
  if (parts.length < 3 || !parts.every((part) => part >= 0 && part <= 255)) return null;
  const far = PARTS.map((own) => own.reduce((sum, value, i) => sum + (value - parts[i]) ** 2, 0));
  return far.indexOf(Math.min(...far));
}
