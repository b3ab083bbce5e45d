// What the planner's estimate looks like: world, rank grid, parameters, bytes of a step, memory.
import { byAxis, coordinates } from "./collectives.js";
import { el, stackedBar, swatch } from "./dom.js";
import { bytes, count, exactBytes, integer } from "./format.js";

const MEMORY_ORDER = ["parameters", "gradients", "optimizer", "activations", "logits", "gathered"];
const MOST_SQUARES = 512;
const NUMBERED = 64;

export function showEstimate(panel, estimate) {
  const place = (name) => panel.querySelector(`[data-show="${name}"]`);
  const { dp, pp, tp } = estimate.axes;
  place("world").textContent = `${integer(estimate.world_size)} ${estimate.world_size === 1 ? "rank" : "ranks"}`;
  place("product").textContent = `dp ${dp} × pp ${pp} × tp ${tp}`;
  place("parameters").textContent = count(estimate.model_parameters);
  place("parameters").title = integer(estimate.model_parameters);
  const perRank = Math.max(...estimate.stages.map((stage) => stage.parameters));
  place("per-rank").textContent = count(perRank);
  place("per-rank").title = integer(perRank);
  place("micro-batch").textContent = integer(estimate.micro_batch_size);
  place("ranks").replaceChildren(rankGrid(estimate), note(estimate));
  place("traffic").replaceChildren(...traffic(estimate));
  place("memory").replaceChildren(...memory(estimate));
}

const stageToken = (stage) => `--series-${stage % 16}`;

function rankGrid(estimate) {
  const { world_size: world, axes } = estimate;
  const shown = Math.min(world, MOST_SQUARES);
  const grid = el("div", { className: "rank-grid" });
  grid.classList.toggle("many", world > NUMBERED);
  for (let first = 0; first < shown; first += axes.tp) {
    const group = el("div", { className: "replica" });
    for (let rank = first; rank < Math.min(first + axes.tp, shown); rank += 1) {
      const { pp, dp, tp } = coordinates(rank, axes);
      const [from, to] = estimate.stages[pp].layers;
      const text = `rank ${rank}: pp ${pp} · dp ${dp} · tp ${tp} · layers ${from}–${to - 1}`;
      const square = el("button", { type: "button", title: text, ariaLabel: text, tabIndex: rank === 0 ? 0 : -1 }, String(rank));
      square.style.setProperty("--swatch", `var(${stageToken(pp)})`);
      group.append(square);
    }
    grid.append(group);
  }
  return grid;
}

function note(estimate) {
  const hidden = estimate.world_size - MOST_SQUARES;
  const rest = hidden > 0 ? ` The other ${integer(hidden)} ranks repeat the pattern.` : "";
  const stages = estimate.axes.pp > 1 ? "One colour a pipeline stage; " : "";
  return el("p", { className: "note", ariaLive: "polite" }, `${stages}squares side by side are one tp group.${rest}`);
}

/** Arrow keys walk the grid; what is focused or hovered is told below it. */
export function readRanks(panel) {
  const place = panel.querySelector('[data-show="ranks"]');
  const tell = (event) => {
    const square = event.target.closest?.(".rank-grid button");
    if (square) place.querySelector(".note").textContent = square.title;
  };
  for (const kind of ["mouseover", "focusin", "click"]) place.addEventListener(kind, tell);
  place.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const all = [...place.querySelectorAll(".rank-grid button")];
    const next = all[all.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

function traffic(estimate) {
  const stage = estimate.stages.reduce((most, other) => (total(other) > total(most) ? other : most));
  const axes = Object.keys(stage.step_bytes).sort(byAxis);
  const sent = axes.filter((axis) => stage.step_bytes[axis] > 0);
  if (sent.length === 0) return [el("p", { className: "note" }, "One rank alone: nothing to send.")];
  const parts = sent.map((axis) => ({
    token: `--axis-${axis}`,
    value: stage.step_bytes[axis],
    title: `${axis}: ${exactBytes(stage.step_bytes[axis])}`,
  }));
  const head = [th("axis"), ...estimate.stages.map((s) => th(estimate.stages.length > 1 ? `stage ${s.stage}` : "a rank", true))];
  const rows = axes
    .filter((axis) => estimate.stages.some((s) => s.step_bytes[axis] > 0))
    .map((axis) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch(`--axis-${axis}`), axis),
        ...estimate.stages.map((s) => sizeCell(s.step_bytes[axis] ?? 0)),
      ),
    );
  return [stackedBar(parts, "Payload bytes of a step by axis"), scrolling(head, rows)];
}

const total = (stage) => Object.values(stage.step_bytes).reduce((sum, value) => sum + value, 0);
const th = (text, number = false) => el("th", { scope: "col", className: number ? "number" : "" }, text);
const sizeCell = (value) => el("td", { className: "number", title: exactBytes(value) }, bytes(value));

function scrolling(head, rows) {
  const table = el("table", { className: "compact" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  return el("div", { className: "scroll-x" }, table);
}

function memory(estimate) {
  const stage = estimate.stages.reduce((most, other) => (other.memory_bytes > most.memory_bytes ? other : most));
  const known = Object.keys(stage.memory).filter((name) => !MEMORY_ORDER.includes(name));
  const names = [...MEMORY_ORDER, ...known].filter((name) => estimate.stages.some((s) => s.memory[name] > 0));
  const token = (name) => `--series-${[...MEMORY_ORDER, ...known].indexOf(name)}`;
  const parts = names.map((name) => ({
    token: token(name),
    value: stage.memory[name] ?? 0,
    title: `${name}: ${bytes(stage.memory[name])}`,
  }));
  const many = estimate.stages.length > 1;
  const head = [th("component"), ...estimate.stages.map((s) => th(many ? `stage ${s.stage}` : "a rank", true))];
  const rows = names.map((name) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, swatch(token(name)), name),
      ...estimate.stages.map((s) => sizeCell(s.memory[name] ?? 0)),
    ),
  );
  rows.push(
    el("tr", {}, el("th", { scope: "row" }, "together"), ...estimate.stages.map((s) => sizeCell(s.memory_bytes))),
  );
  return [stackedBar(parts, "Memory of the fullest rank by component"), scrolling(head, rows)];
}
