// Runs side by side: their curves over steps, time or tokens, and their steps told apart, each beside its plan.
import { places, runsChart } from "./charts/runs.js";
import { el, embedded, stackedBar } from "./dom.js";
import { count, duration, loss } from "./format.js";
import { bars, measuredParts, nameOf, partRows, plannedParts, tokenOf } from "./job/parts.js";
import { slowSteps } from "./slowsteps.js";

const { jobs } = embedded("compared");
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

/** The kept history of a run's attempt, or what its end told of it. */
async function runOf(job) {
  try {
    const answer = await fetch(`/jobs/${job.id}/history/snapshot/?attempt=${job.attempt}`, { headers: { Accept: "application/json" } });
    if (answer.ok) {
      const told = await answer.json();
      if (told.curve.step.length > 0) return { curve: told.curve, ranks: ranksOf(told.parts), whole: true };
    }
  } catch {
    // The page goes on with what it has.
  }
  return { curve: job.curve, ranks: new Map(), whole: false };
}

/** Mean parts of each rank, as `measuredParts` reads them. */
function ranksOf(parts) {
  const line = (index) => ({
    step_s: parts.step_s[index],
    data: parts.data_s[index],
    optimizer: parts.optimizer_s[index],
    exposed: parts.exposed[index] ?? {},
    hidden: parts.hidden[index] ?? {},
  });
  return new Map((parts.rank ?? []).map((rank, index) => [rank, { parts: [line(index)] }]));
}

function columnsOf(curve) {
  const known = (name) => curve[name] ?? curve.step.map(() => null);
  const stepS = known("step_s");
  return {
    step: curve.step,
    time: curve.time,
    tokens: known("tokens"),
    loss: known("loss"),
    step_s: stepS,
    grad_norm: known("grad_norm"),
    learning_rate: known("learning_rate"),
    tokens_s: known("tokens").map((tokens, index) => (tokens && stepS[index] > 0 ? tokens / stepS[index] : null)),
  };
}

function drawCurves(runs, along) {
  for (const chart of drawn) chart.destroy();
  drawn = [];
  const shown = CURVES.filter(({ name }) => runs.some((run) => run.columns[name].some((value) => value !== null)));
  const figures = shown.map(({ title, drag }) => {
    const hint = drag ? el("span", {}, "drag over slow steps: what differs") : null;
    return el("figure", {}, el("figcaption", {}, el("b", {}, title), hint), el("div", { className: "chart" }));
  });
  holder.replaceChildren(...figures);
  shown.forEach(({ name, values, drag }, index) => {
    const lines = runs.map((run, place) => ({ letter: letter(place), place, xs: run.places(along), ys: run.columns[name] })).filter(({ ys }) => ys.some((y) => y !== null));
    const place = figures[index].querySelector(".chart");
    const told = drag && along === "step" ? el("div", { className: "slow-steps" }) : null;
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
  const told = runs.map((run, place) => ({ letter: letter(place), planned: plannedParts(jobs[place].estimate), measured: measuredParts(run.ranks) }));
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
  const words = part ? duration(part.step_s) : side === "planned" ? "no plan" : "no step is told apart";
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

const runs = (await Promise.all(jobs.map(runOf))).map((run) => {
  const columns = columnsOf(run.curve);
  return { ...run, columns, places: (along) => places(columns, along) };
});
const section = document.getElementById("curves");
section.hidden = !runs.some((run) => run.columns.step.length > 0);
if (!section.hidden) {
  const along = () => document.querySelector("[name=along]:checked").value;
  drawCurves(runs, along());
  document.getElementById("along").addEventListener("change", () => drawCurves(runs, along()));
  const short = runs.flatMap((run, place) => (run.whole ? [] : [letter(place)]));
  note.textContent = short.length ? `Of ${short.join(", ")} no history is kept: only the loss that its end told.` : "";
}
drawParts(runs);
