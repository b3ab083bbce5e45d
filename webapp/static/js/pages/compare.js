// Runs side by side: their curves over steps, time or tokens, and their steps told apart, each beside its plan.
import { ALONG, runsChart } from "../charts/runs.js";
import { el, embedded, stackedBar } from "../dom.js";
import { count, duration, loss } from "../format.js";
import { bars, diagnosedSteps, nameOf, partRows, partsOf, tokenOf } from "../job/parts.js";
import { slowSteps } from "../job/slowsteps.js";
import { timeAndSteps } from "../job/stepbar.js";

const { jobs, url } = embedded("compared");
const CURVES = [
  { name: "loss", title: "loss, nats per token", values: (value) => loss(value, 3) },
  { name: "step_s", title: "seconds a step", values: duration, drag: true },
  { name: "tokens_s", title: "tokens a second", values: count },
  { name: "grad_norm", title: "gradient norm", values: (value) => value.toPrecision(3) },
  { name: "learning_rate", title: "learning rate", values: (value) => value.toPrecision(3) },
];
const letter = (place) => "ABCDEF"[place];
const holder = document.getElementById("charts");
const note = document.getElementById("curves-note");
let drawn = [];

/** What is kept of each run, in the page's order; of one that nothing is kept of, what its end told. */
async function runsOf() {
  let kept = [];
  try {
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    if (answer.ok) kept = (await answer.json()).jobs;
  } catch {
    // The page goes on with what it has.
  }
  return jobs.map((job, place) => {
    const { curve, parts } = kept[place] ?? {};
    return curve?.step?.length > 0 ? { curve, parts, whole: true } : { curve: job.curve, parts: null, whole: false };
  });
}

const tells = ({ curve }, name) => curve[name]?.some((value) => value !== null) ?? false;

function drawCurves(runs, along) {
  for (const chart of drawn) chart.destroy();
  drawn = [];
  const placed = ALONG[along].column;
  const line = (run, at, name) => ({ letter: letter(at), place: at, xs: run.curve[placed], ys: run.curve[name] });
  const linesOf = (name) => runs.flatMap((run, at) => (tells(run, name) && tells(run, placed) ? [line(run, at, name)] : []));
  const shown = CURVES.map((curve) => ({ ...curve, lines: linesOf(curve.name) })).filter(({ lines }) => lines.length > 0);
  const apart = ({ drag }) => drag && along === "step";
  const figures = shown.map((curve) => {
    const hint = apart(curve) ? el("span", {}, "drag over slow steps: what differs") : null;
    return el("figure", {}, el("figcaption", {}, el("b", {}, curve.title), hint), el("div", { className: "chart" }));
  });
  holder.replaceChildren(...figures);
  shown.forEach((curve, index) => {
    const { lines, values } = curve;
    const place = figures[index].querySelector(".chart");
    const told = apart(curve) ? el("div", { className: "slow-steps" }) : null;
    const select = told && ((from, to) => tell(told, runs, from, to));
    drawn.push(runsChart(place, lines, { along, values, select }));
    if (told) figures[index].append(told);
  });
}

/** Of every run that has these steps. */
function tell(place, runs, from, to) {
  const asked = jobs.flatMap((job, index) => (runs[index].whole ? [{ ...job, letter: letter(index) }] : []));
  place.replaceChildren(...asked.map((job) => slowSteps(job, Math.ceil(from), Math.floor(to))));
  if (asked.length === 0) place.replaceChildren(el("p", { className: "note" }, "No history is kept of these runs."));
}

function drawParts(runs) {
  const told = runs.map((run, place) => {
    const { planned, measured } = diagnosedSteps(jobs[place]);
    return { letter: letter(place), planned, measured: measured ?? (run.parts && partsOf(run.parts, run.parts.steps)) };
  });
  if (!told.some(({ planned, measured }) => planned || measured)) return;
  const longest = Math.max(...told.flatMap(({ planned, measured }) => [planned?.step_s ?? 0, measured?.step_s ?? 0]));
  const section = document.getElementById("parts");
  section.hidden = false;
  section.querySelector("[data-bars]").replaceChildren(
    ...told.flatMap(({ letter: name, planned, measured }, place) => [line(name, place, "planned", planned, longest), line("", place, "measured", measured, longest)]),
  );
  const rows = new Map();
  told.forEach(({ planned, measured }, place) => {
    for (const row of partRows(planned, measured)) {
      const title = nameOf(row);
      if (!rows.has(title)) rows.set(title, jobs.map(() => null));
      rows.get(title)[place] = row;
    }
  });
  section.querySelector("tbody").replaceChildren(...[...rows].map(([title, cells]) => el("tr", {}, el("th", { scope: "row" }, title), ...cells.map(partCell))));
}

function line(name, place, side, part, longest) {
  const words = part ? timeAndSteps(part) : side === "planned" ? "no plan" : "no step is told apart";
  const [made] = part ? bars(part, null) : [null];
  const bar = el("div", { className: "of-run" });
  if (made) {
    const parts = made.shown.map((each) => ({ token: tokenOf(each), value: each.seconds, title: `${nameOf(each)}: ${duration(each.seconds)}` }));
    const drawnBar = stackedBar(parts, `${jobs[place].name}, ${side}: ${words}`);
    drawnBar.style.width = `${(100 * part.step_s) / longest}%`;
    bar.append(drawnBar);
  }
  const mark = el("span", { className: "letter" }, name);
  mark.dataset.run = String(place);
  return el("div", { className: "part-line" }, mark, el("span", { className: "note" }, side), bar, el("span", { className: "number" }, words));
}

function partCell(row) {
  if (!row) return el("td", { className: "number" }, "–");
  const planned = row.planned === null ? null : el("div", { className: "note" }, `planned ${duration(row.planned)}`);
  return el("td", { className: "number" }, row.measured === null ? "–" : duration(row.measured), planned);
}

const runs = await runsOf().finally(() => delete document.querySelector(".runs").dataset.reading); // drawn before the next paint
const section = document.getElementById("curves");
section.hidden = !runs.some(({ curve }) => curve.step.length > 0);
if (!section.hidden) {
  const along = () => document.querySelector("[name=along]:checked").value;
  drawCurves(runs, along());
  document.getElementById("along").addEventListener("change", () => drawCurves(runs, along()));
  const short = runs.flatMap((run, place) => (run.whole ? [] : [letter(place)]));
  note.textContent = short.length ? `Of ${short.join(", ")} no history is kept: only the loss that its end told; its time counts from the end of the first step in that.` : "";
}
drawParts(runs);
