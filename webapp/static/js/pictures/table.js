// Small tables next to pictures.
import { el, swatch } from "../dom.js";

export const th = (text, number = false) => el("th", { scope: "col", className: number ? "number" : "" }, text);
export const cell = (text, title) => el("td", { className: "number", title }, text);
export const rowHead = (token, text) => el("th", { scope: "row" }, token ? swatch(token) : null, text);

export function scrolling(head, rows) {
  const table = el("table", { className: "compact" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  return el("div", { className: "scroll-x" }, table);
}

/** Return the stages to list: all of a short pipeline, else the first two, the fullest and the last. */
export function columns(stages, most = 6) {
  if (stages.length <= most) return stages;
  const fullest = stages.reduce((best, s) => (s.memory_bytes > best.memory_bytes ? s : best));
  const shown = new Set([0, 1, fullest.stage, stages.length - 1]);
  return stages.filter((s) => shown.has(s.stage));
}

export const stageHead = (stages, all) =>
  stages.map((s) => th(all.length > 1 ? `stage ${s.stage}` : "per rank", true));
