// The step time breakdown: a planned and a measured bar on one scale, with figures.
import { el, swatch } from "../dom.js";
import { duration, sureness } from "../format.js";
import { bars, formatPartName, partRows, getSteps, getToken } from "./parts.js";

const LETTER = 1.7; // percent of the bar per letter, to leave out words that do not fit
const MOST_FIGURES = 12;

export function stepBar(section) {
  const [rows, figures, note] = ["[data-bars]", "[data-figures]", "[data-note]"].map((name) => section.querySelector(name));
  let drawn = "";
  return (job, state) => {
    const { planned, measured } = getSteps(job, state);
    const key = JSON.stringify([planned, measured, job.finished]);
    if (key === drawn) return;
    drawn = key;
    const [above, below] = bars(planned, measured);
    const measuredRow = bar("measured", below, measuredWords(below, job.finished));
    rows.replaceChildren(...(section.dataset.unplanned === undefined ? [bar("planned", above, plannedWords(above))] : []), measuredRow);
    figures.replaceChildren(...partRows(planned, measured).slice(0, MOST_FIGURES).map((row) => figure(row, planned, measured)));
    const all = [...(planned?.parts ?? []), ...(measured?.parts ?? [])];
    note.textContent = [
      planned?.sure > 1 ? `Planned: ${sureness(planned.sure)}.` : "",
      measured?.parts.length > 0 ? "The measured bar shows the median step time, divided in the mean proportions of the last steps." : "",
      all.some((part) => part.kind === "exposed") ? "Solid: exposed communication." : "",
      all.some((part) => part.waiting_s > 0) ? "Hatched: waiting for the slowest rank." : "",
      all.some((part) => part.kind === "hidden") ? "Striped: communication overlapped with compute." : "",
    ].filter(Boolean).join(" ");
  };
}

function plannedWords(step) {
  if (!step) return "no plan";
  return step.sure > 0 && step.sure <= 1 ? `${duration(step.step_s)} ${sureness(step.sure)}` : duration(step.step_s);
}

function measuredWords(step, finished) {
  return step ? timeAndSteps(step) : finished ? "no step finished" : "no step yet";
}

/** "81 ms · 64 steps", the step time and the number of steps. */
export function timeAndSteps(step) {
  return `${duration(step.step_s)}${step.steps > 0 ? ` · ${step.steps} ${step.steps === 1 ? "step" : "steps"}` : ""}`;
}

function bar(name, step, words) {
  const lane = el("div", { className: "parts", role: "img", ariaLabel: `${name}: ${words}` });
  const under = el("div", { className: "parts hidden-lane", ariaHidden: "true" });
  if (step) {
    lane.append(...step.shown.map(segment));
    if (step.rest > 0) lane.append(makeRest(step));
    under.append(...step.hidden.map(segment));
  }
  const row = el("div", { className: "step-row" }, el("span", { className: "side" }, name), lane, el("span", { className: "total" }, words));
  if (step?.hidden.length > 0) row.append(el("span", { className: "side", ariaHidden: "true" }, "overlapped"), under);
  row.dataset.side = name;
  return row;
}

function segment(part) {
  const words = `${formatPartName(part)}: ${duration(part.seconds)}`;
  const waited = part.waiting > 0 ? `, including ${duration(part.waiting_s)} of waiting for the slowest rank` : "";
  const span = el("span", { title: words + waited }, part.share >= LETTER * (part.name.length + 1) && part.kind !== "hidden" ? el("b", {}, part.name) : null);
  span.dataset.part = part.name;
  span.dataset.kind = part.kind;
  span.style.width = `${part.share}%`;
  span.style.setProperty("--swatch", `var(${getToken(part)})`);
  if (part.waiting > 0) {
    const late = el("i", {});
    late.style.width = `${(100 * part.waiting) / part.share}%`;
    span.append(late);
  }
  return span;
}

function makeRest(step) {
  const span = el("span", { title: "not broken down" }, step.rest >= 25 ? "not broken down" : null);
  span.dataset.part = "rest";
  span.style.width = `${step.rest}%`;
  return span;
}

function figure(row, planned, measured) {
  const mark = swatch(getToken(row));
  if (row.kind === "hidden") mark.classList.add("hatched");
  const isKnown = [planned, measured].map((side) => side?.parts.length > 0);
  const words = [row.planned, row.measured].map((value) => (value === null ? "–" : duration(value)));
  const [before, after] = [isKnown[0] ? words[0] : null, isKnown[1] ? el("b", {}, words[1]) : null];
  return el("div", {}, el("dt", {}, mark, formatPartName(row)), el("dd", {}, before, before && after ? "\u2009→\u2009" : null, after));
}
