// The step time breakdown: a planned and a measured bar on one scale, with figures.
import { el, swatch } from "../dom.js";
import { duration, sureness } from "../format.js";
import { bars, nameOf, partRows, stepsOf, tokenOf } from "./parts.js";

const LETTER = 1.7; // percent of the bar per letter, to leave out words that do not fit
const MOST_FIGURES = 12;

export function stepBar(section) {
  const [rows, figures, note] = ["[data-bars]", "[data-figures]", "[data-note]"].map((name) => section.querySelector(name));
  let drawn = "";
  return (job, state) => {
    const { planned, measured } = stepsOf(job, state);
    const key = JSON.stringify([planned, measured, job.finished]);
    if (key === drawn) return;
    drawn = key;
    const [above, below] = bars(planned, measured);
    rows.replaceChildren(bar("planned", above, plannedWords(above)), bar("measured", below, measuredWords(below, job.finished)));
    figures.replaceChildren(...partRows(planned, measured).slice(0, MOST_FIGURES).map((row) => figure(row, planned, measured)));
    const told = [...(planned?.parts ?? []), ...(measured?.parts ?? [])];
    note.textContent = [
      planned?.sure > 1 ? `Planned: ${sureness(planned.sure)}.` : "",
      measured?.parts.length > 0 ? "The measured bar shows the median step time, divided in the mean proportions of the last steps." : "",
      told.some((part) => part.kind === "exposed") ? "Solid: exposed communication." : "",
      told.some((part) => part.waiting_s > 0) ? "Hatched: waiting for the slowest rank." : "",
      told.some((part) => part.kind === "hidden") ? "Striped: communication overlapped with compute." : "",
    ].filter(Boolean).join(" ");
  };
}

function plannedWords(told) {
  if (!told) return "no plan";
  return told.sure > 0 && told.sure <= 1 ? `${duration(told.step_s)} ${sureness(told.sure)}` : duration(told.step_s);
}

function measuredWords(told, finished) {
  return told ? timeAndSteps(told) : finished ? "no step finished" : "no step yet";
}

/** "81 ms · 64 steps", the step time and the number of steps. */
export function timeAndSteps(told) {
  return `${duration(told.step_s)}${told.steps > 0 ? ` · ${told.steps} ${told.steps === 1 ? "step" : "steps"}` : ""}`;
}

function bar(name, told, words) {
  const lane = el("div", { className: "parts", role: "img", ariaLabel: `${name}: ${words}` });
  const under = el("div", { className: "parts hidden-lane", ariaHidden: "true" });
  if (told) {
    lane.append(...told.shown.map(segment));
    if (told.rest > 0) lane.append(restOf(told));
    under.append(...told.hidden.map(segment));
  }
  const row = el("div", { className: "step-row" }, el("span", { className: "side" }, name), lane, el("span", { className: "total" }, words));
  if (told?.hidden.length > 0) row.append(el("span", { className: "side", ariaHidden: "true" }, "overlapped"), under);
  row.dataset.side = name;
  return row;
}

function segment(part) {
  const words = `${nameOf(part)}: ${duration(part.seconds)}`;
  const waited = part.waiting > 0 ? `, including ${duration(part.waiting_s)} of waiting for the slowest rank` : "";
  const span = el("span", { title: words + waited }, part.share >= LETTER * (part.name.length + 1) && part.kind !== "hidden" ? el("b", {}, part.name) : null);
  span.dataset.part = part.name;
  span.dataset.kind = part.kind;
  span.style.width = `${part.share}%`;
  span.style.setProperty("--swatch", `var(${tokenOf(part)})`);
  if (part.waiting > 0) {
    const late = el("i", {});
    late.style.width = `${(100 * part.waiting) / part.share}%`;
    span.append(late);
  }
  return span;
}

function restOf(told) {
  const span = el("span", { title: "not broken down" }, told.rest >= 25 ? "not broken down" : null);
  span.dataset.part = "rest";
  span.style.width = `${told.rest}%`;
  return span;
}

function figure(row, planned, measured) {
  const mark = swatch(tokenOf(row));
  if (row.kind === "hidden") mark.classList.add("hatched");
  const told = [planned, measured].map((side) => side?.parts.length > 0);
  const words = [row.planned, row.measured].map((value) => (value === null ? "–" : duration(value)));
  const [before, after] = [told[0] ? words[0] : null, told[1] ? el("b", {}, words[1]) : null];
  return el("div", {}, el("dt", {}, mark, nameOf(row)), el("dd", {}, before, before && after ? "\u2009→\u2009" : null, after));
}
