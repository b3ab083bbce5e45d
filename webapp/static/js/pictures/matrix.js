// Who sends to whom in a step: a cell a pair of ranks, darker for more bytes. The pixels are drawn, the numbers tabled.
import { color } from "../charts/theme.js";
import { el } from "../dom.js";
import { bytes, exactBytes } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const LISTED = 8;

export function drawMatrix(matrix) {
  const ranks = matrix.length;
  const most = Math.max(1, ...matrix.flat());
  const canvas = el("canvas", { className: "matrix", width: ranks, height: ranks, role: "img", ariaLabel: `Bytes from each of ${ranks} ranks to each other` });
  const told = el("p", { className: "note", ariaLive: "polite" }, `Rows send, columns receive; the darkest pair moves ${bytes(most)} a step.`);
  paint(canvas, matrix, most);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const to = Math.min(ranks - 1, Math.floor((ranks * (event.clientX - box.left)) / box.width));
    const from = Math.min(ranks - 1, Math.floor((ranks * (event.clientY - box.top)) / box.height));
    if (from >= 0 && to >= 0) told.textContent = `rank ${from} sends rank ${to} ${exactBytes(matrix[from][to])} a step`;
  });
  const pairs = matrix
    .flatMap((row, from) => row.map((sent, to) => ({ from, to, sent })))
    .filter((pair) => pair.sent > 0)
    .sort((a, b) => b.sent - a.sent)
    .slice(0, LISTED);
  const rows = pairs.map((pair) => el("tr", {}, rowHead(null, `${pair.from} → ${pair.to}`), cell(bytes(pair.sent), exactBytes(pair.sent))));
  const table = el("details", {}, el("summary", {}, "The busiest pairs"), scrolling([th("ranks"), th("a step", true)], rows));
  return [canvas, told, table];
}

/** One colour, as strong as the share of the most bytes; the square root keeps small ones visible. */
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
