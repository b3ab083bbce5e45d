// Charts by axis and rank: a small chart per axis, then per rank, with one scale.
import { color } from "../charts/theme.js";
import { axisToken } from "../timeline/colors.js";
import { el } from "../dom.js";
import { integer } from "../format.js";
import { computeCells } from "./cells.js";

const MOST = 128;
const [WIDTH, HEIGHT] = [150, 36];

/** Return draw(bins, drawn, ranks, figure), which draws only while the details are open. */
export function multiples(place, details) {
  let newest = null;
  details.addEventListener("toggle", () => newest && draw(...newest));
  document.addEventListener("themechange", () => newest && draw(...newest));

  function draw(bins, drawn, ranks, figure) {
    newest = [bins, drawn, ranks, figure];
    if (!details.open || drawn.columns < 2) return;
    const axes = [...new Set([...bins.rows.values()].flatMap((row) => [...row.keys()].map((key) => key.split("/")[0])))].sort();
    const window = { from: drawn.times[0], to: drawn.times.at(-1) };
    const charts = axes.map((axis) => {
      const { cells, columns } = computeCells(bins, ranks, (key) => key.split("/")[0] === axis, window);
      const mean = new Float64Array(columns);
      for (let i = 0; i < cells.length; i += 1) mean[i % columns] += cells[i] / ranks.length;
      return { name: `${axis}, mean over ranks`, token: axisToken(axis), values: mean };
    });
    ranks.slice(0, MOST).forEach((rank, row) => {
      charts.push({ name: `rank ${rank}`, token: "--part-compute", values: drawn.cells.subarray(row * drawn.columns, (row + 1) * drawn.columns) });
    });
    const most = charts.reduce((top, { values }) => values.reduce((high, value) => (value > high ? value : high), top), 0);
    place.replaceChildren(...charts.map((chart) => tiny(chart, most, figure)));
    if (ranks.length > MOST) place.append(el("p", { className: "note" }, `These charts show the first ${MOST} of ${integer(ranks.length)} ranks. The rank heatmap shows all ranks.`));
  }
  return draw;
}

function tiny({ name, token, values }, most, figure) {
  const known = values.filter((value) => !Number.isNaN(value));
  const top = known.length > 0 ? Math.max(...known) : NaN;
  const words = known.length > 0 ? `at most ${figure.words(top)}` : figure.words(top);
  const canvas = el("canvas", { width: 2 * WIDTH, height: 2 * HEIGHT, role: "img", ariaLabel: `${name}: ${words}` });
  const context = canvas.getContext("2d");
  context.fillStyle = color(token);
  const wide = canvas.width / values.length;
  values.forEach((value, i) => {
    const tall = most > 0 ? (canvas.height * value) / most : 0;
    if (tall > 0) context.fillRect(i * wide, canvas.height - tall, Math.max(1, wide), tall);
  });
  return el("figure", {}, canvas, el("figcaption", {}, name, " ", el("span", { className: "note" }, words.replace("at most", "≤"))));
}
