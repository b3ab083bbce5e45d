// The planned traffic matrix of a step: one cell per pair of ranks, and a table of the busiest pairs.
import { color } from "../charts/theme.js";
import { el } from "../dom.js";
import { decimalBytes, exactBytes } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const LISTED = 8;

export function drawMatrix(matrix) {
  const ranks = matrix.length;
  const most = Math.max(1, ...matrix.flat());
  const canvas = el("canvas", { className: "matrix", width: ranks, height: ranks, role: "img", ariaLabel: `Bytes per step from each of ${ranks} ranks to each other rank` });
  const output = el("p", { className: "note", ariaLive: "polite" }, `Rows are sending ranks, and columns are receiving ranks. The darkest cell means ${decimalBytes(most)} per step.`);
  paint(canvas, matrix, most);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const to = Math.min(ranks - 1, Math.floor((ranks * (event.clientX - box.left)) / box.width));
    const from = Math.min(ranks - 1, Math.floor((ranks * (event.clientY - box.top)) / box.height));
    if (from >= 0 && to >= 0) output.textContent = `rank ${from} to rank ${to}: ${exactBytes(matrix[from][to])} per step`;
  });
  const pairs = matrix
    .flatMap((row, from) => row.map((sent, to) => ({ from, to, sent })))
    .filter((pair) => pair.sent > 0)
    .sort((a, b) => b.sent - a.sent)
    .slice(0, LISTED);
  const rows = pairs.map((pair) => el("tr", {}, rowHead(null, `${pair.from} → ${pair.to}`), cell(decimalBytes(pair.sent), exactBytes(pair.sent))));
  const table = el("details", {}, el("summary", {}, "Busiest pairs"), scrolling([th("ranks"), th("bytes per step", true)], rows));
  return [canvas, output, table];
}

/** Paint the cells in one color. The square root keeps small values visible. */
function paint(canvas, matrix, most) {
  const context = canvas.getContext("2d");
  context.fillStyle = color("--axis-dp");
  matrix.forEach((row, from) =>
    row.forEach((sent, to) => {
      if (sent === 0) return;
      context.globalAlpha = 0.15 + 0.85 * Math.sqrt(sent / most);
      context.fillRect(to, from, 1, 1);
    }),
  );
}
