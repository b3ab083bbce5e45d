// Rank placement: one square per rank, colored by pipeline stage or by node.
import { coordinates } from "../collectives.js";
import { el } from "../dom.js";
import { integer } from "../format.js";

const MOST_SQUARES = 512;
const NUMBERED = 64;
const SERIES = 16;

/**
 * @param {Estimate} estimate
 */
export function rankGrid(estimate) {
  const grid = squares(estimate);
  const { nodes } = estimate.cluster;
  if (nodes <= 1) return [grid, note(estimate)];
  const toggle = el("label", { className: "check" }, el("input", { type: "checkbox", checked: grid.dataset.by === "node" }), " color by node");
  toggle.firstChild.addEventListener("change", (event) => {
    grid.dataset.by = event.target.checked ? "node" : "stage";
    for (const square of grid.querySelectorAll("button")) paint(square, grid.dataset.by);
  });
  return [toggle, grid, note(estimate)];
}

function paint(square, by) {
  square.style.setProperty("--swatch", `var(--series-${Number(square.dataset[by]) % SERIES})`);
}

function squares(estimate) {
  const { world_size: world, axes, cluster } = estimate;
  const shown = Math.min(world, MOST_SQUARES);
  const grid = el("div", { className: "rank-grid" });
  grid.dataset.by = "stage";
  grid.classList.toggle("many", world > NUMBERED);
  for (let first = 0; first < shown; first += axes.tp) {
    const group = el("div", { className: "replica" });
    for (let rank = first; rank < Math.min(first + axes.tp, shown); rank += 1) {
      const { pp, dp, cp, tp } = coordinates(rank, axes);
      const layers = estimate.stages[pp].layers.map(([from, to]) => (to - from === 1 ? from : `${from}–${to - 1}`)).join(", ");
      const node = Math.floor(rank / cluster.per_node);
      const where = cluster.nodes > 1 ? ` · node ${node}` : "";
      const part = axes.cp > 1 ? ` · cp ${cp}` : "";
      const text = `rank ${rank}: pp ${pp} · dp ${dp}${part} · tp ${tp}${where} · layers ${layers}`;
      const square = el("button", { type: "button", title: text, ariaLabel: text, tabIndex: rank === 0 ? 0 : -1 }, String(rank));
      square.dataset.stage = pp;
      square.dataset.node = node;
      paint(square, "stage");
      group.append(square);
    }
    grid.append(group);
  }
  return grid;
}

function note(estimate) {
  const hidden = estimate.world_size - MOST_SQUARES;
  const rest = hidden > 0 ? ` ${hidden === 1 ? "1 more rank repeats" : `${integer(hidden)} more ranks repeat`} the pattern.` : "";
  const stages = estimate.axes.pp > 1 ? "Colors show pipeline stages. " : "";
  return el("p", { className: "note", ariaLive: "polite" }, `${stages}Adjacent squares form one tp group.${rest}`);
}

/** Describe the focused or hovered rank below the grid. Arrow keys move the focus. */
export function readRanks(panel) {
  const place = panel.querySelector('[data-show="ranks"]');
  const showRank = (event) => {
    const square = event.target.closest?.(".rank-grid button");
    if (square) place.querySelector(".note").textContent = square.title;
  };
  for (const kind of ["mouseover", "focusin", "click"]) place.addEventListener(kind, showRank);
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
