// The page Compare: curves of all runs over steps, time or tokens, and the step time breakdown with plans.
import { ALONG, runsChart } from "../charts/runs.js";
import { el, embedded, stackedBar, swatch } from "../dom.js";
import { count, duration, loss } from "../format.js";
import { bars, diagnosedSteps, formatPartName, partRows, makeParts, getToken } from "../job/parts.js";
import { slowSteps } from "../job/slowsteps.js";
import { timeAndSteps } from "../job/stepbar.js";

const { jobs, url } = embedded("compared");
const CURVES = [
  { name: "loss", title: "loss, nats per token", values: (value) => loss(value, 3) },
  { name: "step_s", title: "step time", values: duration, drag: true },
  { name: "tokens_s", title: "tokens per second", values: count },
  { name: "grad_norm", title: "gradient norm", values: (value) => value.toPrecision(3) },
  { name: "learning_rate", title: "learning rate", values: (value) => value.toPrecision(3) },
];
const letter = (place) => "ABCDEF"[place];
const holder = document.getElementById("charts");
const note = document.getElementById("curves-note");
let drawn = [];

/** Return the history of each run, in the order of the page. A run without a history has the loss of its exit report. */
async function fetchRuns() {
  let stored = [];
  try {
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    if (answer.ok) stored = (await answer.json()).jobs;
  } catch {
    // The page uses the exit reports.
  }
  return jobs.map((job, place) => {
    const { curve, parts, logged } = stored[place] ?? {};
    if (!(curve?.step?.length > 0) && !(logged?.step?.length > 0)) return { curve: job.curve, parts: null, logged: {}, whole: false };
    return { curve: curve?.step ? curve : { step: [] }, parts, logged: logged ?? {}, whole: true };
  });
}

const hasValues = ({ curve }, name) => curve[name]?.some((value) => value !== null) ?? false;

function drawCurves(runs, along) {
  for (const chart of drawn) chart.destroy();
  drawn = [];
  const placed = ALONG[along].column;
  const line = (curve, at, name) => ({ letter: letter(at), name: jobs[at].name, place: at, xs: curve[placed], ys: curve[name] });
  const makeLines = (name) =>
    runs.flatMap((run, at) => {
      const curve = name === "loss" && !hasValues(run, name) ? run.logged : run.curve; // a script numbers its steps itself
      return hasValues({ curve }, name) && hasValues({ curve }, placed) ? [line(curve, at, name)] : [];
    });
  const isLogged = runs.some((run) => !hasValues(run, "loss") && hasValues({ curve: run.logged }, "loss"));
  const getTitle = ({ name, title }) => (name === "loss" && isLogged ? "loss" : title); // scripts choose the unit
  const shown = CURVES.map((curve) => ({ ...curve, title: getTitle(curve), lines: makeLines(curve.name) })).filter(({ lines }) => lines.length > 0);
  /** @param {{drag?: boolean}} curve */
  const apart = ({ drag }) => drag && along === "step";
  const figures = shown.map((curve) => {
    const hint = apart(curve) ? el("span", {}, "Drag over slow steps to compare them with the other steps.") : null;
    return el("figure", {}, el("figcaption", {}, el("b", {}, curve.title), hint), el("div", { className: "chart" }));
  });
  holder.replaceChildren(...figures);
  shown.forEach((curve, index) => {
    const { lines, values } = curve;
    const place = figures[index].querySelector(".chart");
    const output = apart(curve) ? el("div", { className: "slow-steps" }) : null;
    const select = output && ((from, to) => showSlowSteps(output, runs, from, to));
    drawn.push(runsChart(place, lines, { along, values, select }));
    if (output) figures[index].append(output);
  });
}

/** Show the selected steps of every run with a history. */
function showSlowSteps(place, runs, from, to) {
  const whole = jobs.flatMap((job, index) => (runs[index].whole ? [{ ...job, letter: letter(index) }] : []));
  place.replaceChildren(...whole.map((job) => slowSteps(job, Math.ceil(from), Math.floor(to))));
  if (whole.length === 0) place.replaceChildren(el("p", { className: "note" }, "These runs have no stored step history."));
}

function drawParts(runs) {
  const sides = runs.map((run, place) => {
    const { planned, measured } = diagnosedSteps(jobs[place]);
    return { letter: letter(place), planned, measured: measured ?? (run.parts && scaled(makeParts(run.parts, run.parts.steps), jobs[place].step_s)) };
  });
  if (!sides.some(({ planned, measured }) => planned || measured)) return;
  const longest = Math.max(...sides.flatMap(({ planned, measured }) => [planned?.step_s ?? 0, measured?.step_s ?? 0]));
  const section = document.getElementById("parts");
  section.hidden = false;
  section.querySelector("[data-bars]").replaceChildren(
    ...sides.flatMap(({ letter: name, planned, measured }, place) => [line(name, place, "planned", planned, longest), line("", place, "measured", measured, longest)]),
  );
  const rows = new Map();
  sides.forEach(({ planned, measured }, place) => {
    for (const row of partRows(planned, measured)) {
      const title = formatPartName(row);
      if (!rows.has(title)) rows.set(title, jobs.map(() => null));
      rows.get(title)[place] = row;
    }
  });
  section.querySelector("tbody").replaceChildren(...[...rows].map(([title, cells]) => el("tr", {}, el("th", { scope: "row" }, mark(cells), title), ...cells.map(partCell))));
  const kinds = new Set([...rows.values()].flat().map((row) => row?.kind));
  section.querySelector("[data-note]").textContent = kinds.has("hidden") ? "Overlapped communication runs during compute, and adds no time to the step." : "";
}

/** Parts are means. Scaled, their sum is the median step time, as on the job page. */
function scaled(step, step_s) {
  if (!step_s || !(step.step_s > 0)) return step;
  const parts = step.parts.map((part) => ({ ...part, seconds: (part.seconds * step_s) / step.step_s }));
  return { ...step, step_s, parts };
}

function mark(cells) {
  const row = cells.find((cell) => cell);
  const square = swatch(getToken(row));
  if (row.kind === "hidden") square.classList.add("hatched");
  return square;
}

function line(name, place, side, part, longest) {
  const words = part ? timeAndSteps(part) : side === "planned" ? "no plan" : "not measured";
  const [made] = part ? bars(part, null) : [null];
  const bar = el("div", { className: "of-run" });
  if (made) {
    const parts = made.shown.map((each) => ({ token: getToken(each), value: each.seconds, title: `${formatPartName(each)}: ${duration(each.seconds)}` }));
    const drawnBar = stackedBar(parts, `${jobs[place].name}, ${side}: ${words}`);
    drawnBar.style.width = `${(100 * part.step_s) / longest}%`;
    bar.append(drawnBar);
  }
  const run = el("span", { className: "letter" }, name);
  run.dataset.run = String(place);
  return el("div", { className: "part-line" }, run, el("span", { className: "note" }, side), bar, el("span", { className: "number" }, words));
}

function partCell(row) {
  if (!row) return el("td", { className: "number" }, "–");
  const planned = row.planned === null ? null : el("div", { className: "note" }, `planned ${duration(row.planned)}`);
  return el("td", { className: "number" }, row.measured === null ? "–" : duration(row.measured), planned);
}

const runs = await fetchRuns().finally(() => delete document.querySelector(".runs").dataset.reading); // drawn before the next paint
const section = document.getElementById("curves");
section.hidden = !runs.some(({ curve, logged }) => curve.step.length > 0 || logged.step?.length > 0);
if (!section.hidden) {
  const along = () => document.querySelector("[name=along]:checked").value;
  drawCurves(runs, along());
  document.getElementById("along").addEventListener("change", () => drawCurves(runs, along()));
  const short = runs.flatMap((run, place) => (run.whole || run.curve.step.length === 0 ? [] : [letter(place)]));
  note.textContent = short.length ? `No step history is stored for ${short.join(", ")}. The loss comes from the exit report of the run, and the time axis starts at the first point.` : "";
}
drawParts(runs);
