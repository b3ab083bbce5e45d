// A heat map on one canvas, with one pixel per cell. If the screen has fewer pixels than cells, a pixel shows the maximum
// of its cells. The mouse and the arrow keys choose a cell, and `onDescribe` receives its description.
import { channels, textOn } from "../charts/contrast.js";
import { color } from "../charts/theme.js";
import { el } from "../dom.js";
import { fewer } from "./cells.js";
import { atShare, computeShade, shades } from "./scale.js";

const LEAST_BETWEEN = 8; // px from one line to the next
const MAX_LABELS = 8; // per axis, short labels
const WIDE_LABEL_PX = 72; // least distance between times
const MAX_VALUE_CELLS = 8; // rows and columns of a map with values in its cells
const VALUE_MARGIN_PX = 4; // free space in a cell next to its value

/** Return the number of cells that the screen can show, or all cells while the size is unknown. */
const roomFor = (cells, size) => (size > 0 ? Math.min(cells, Math.ceil(size * devicePixelRatio)) : cells);

/**
 * Return {show(cells, {rows, columns, most, borders, axes, values}), pointed, destroy}. `cells` are row by row, NaN if unknown.
 * `borders` are the rows and columns at which a host begins. `axes` are {rows, columns}, each {title, words(cell)}.
 * A small map shows `values(cell)` in its cells.
 * `describe(row, column)` returns the text of a cell. `onDescribe` receives the text of the chosen cell, again after each show.
 * Call `destroy()` before you draw another map in the container.
 */
export function heatMap(container, { label, describe, onDescribe, token = "--axis-dp", tall = false }) {
  const canvas = el("canvas", { className: "heat-cells", role: "img", ariaLabel: label, tabIndex: 0 });
  const lines = el("canvas", { className: "heat-lines", ariaHidden: "true" });
  const mark = el("div", { className: "heat-mark", hidden: true });
  const box = el("div", { className: tall ? "heat-box tall" : "heat-box" }, canvas, lines, mark);
  const [rowLabels, columnLabels] = ["heat-rows", "heat-columns"].map((className) => el("div", { className, ariaHidden: "true" }));
  const titles = ["heat-row-title", "heat-column-title"].map((className) => el("span", { className, ariaHidden: "true" }));
  container.replaceChildren(el("div", { className: tall ? "heat-frame tall" : "heat-frame" }, titles[0], rowLabels, box, columnLabels, titles[1]));
  const context = canvas.getContext("2d", { willReadFrequently: false });
  /** @type {any} */
  let shown = null;
  /** @type {{shades: Uint32Array, missing: number} | null} */
  let inks = null;
  /** @type {any} */
  let image = null;
  /** @type {any} */
  let at = null;

  function colors() {
    inks ??= { shades: shades(channels(color("--sunken")), channels(color(token))), missing: shades(channels(color("--surface")), channels(color("--surface")))[1] };
    return inks;
  }

  function paint() {
    if (!shown) return;
    const { most } = shown;
    const [rows, columns] = [roomFor(shown.rows, box.clientHeight), roomFor(shown.columns, box.clientWidth)];
    const cells = fewer(shown.cells, shown.rows, shown.columns, rows, columns);
    if (canvas.width !== columns || canvas.height !== rows) [canvas.width, canvas.height] = [columns, rows];
    if (image?.width !== columns || image?.height !== rows) image = context.createImageData(columns, rows);
    const ink = colors();
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i += 1) pixels[i] = Number.isNaN(cells[i]) ? ink.missing : ink.shades[computeShade(cells[i], most)];
    context.putImageData(image, 0, 0);
    paintLines();
  }

  /** Draw the borders of hosts as lines of one pixel, unless the lines would cover most of the map. */
  function paintLines() {
    const [width, height] = [box.clientWidth, box.clientHeight];
    if (width === 0) return;
    [lines.width, lines.height] = [width, height].map((size) => Math.round(size * devicePixelRatio));
    const drawn = lines.getContext("2d");
    drawn.scale(devicePixelRatio, devicePixelRatio);
    drawn.fillStyle = color("--line-strong");
    const far = (borders, size) => (borders && size / (borders.length + 1) >= LEAST_BETWEEN ? borders : []);
    for (const row of far(shown.borders?.rows, height)) drawn.fillRect(0, Math.round((row * height) / shown.rows), width, 1);
    for (const column of far(shown.borders?.columns, width)) drawn.fillRect(Math.round((column * width) / shown.columns), 0, 1, height);
    lines.dataset.values = String(paintValues(drawn, width, height));
  }

  /** Draw the value of each cell above 0, and return their number. Draw no value if one does not fit. */
  function paintValues(drawn, width, height) {
    const { rows, columns, cells, most, values } = shown;
    if (!values || Math.max(rows, columns) > MAX_VALUE_CELLS) return 0;
    drawn.font = "11px system-ui, sans-serif";
    [drawn.textAlign, drawn.textBaseline] = ["center", "middle"];
    const texts = [...cells].map((value) => (value > 0 ? values(value) : ""));
    if (texts.some((text) => drawn.measureText(text).width > width / columns - VALUE_MARGIN_PX)) return 0;
    texts.forEach((text, i) => {
      const shade = colors().shades[computeShade(cells[i], most)];
      drawn.fillStyle = textOn([shade & 255, (shade >> 8) & 255, (shade >> 16) & 255]);
      drawn.fillText(text, ((i % columns) + 0.5) * (width / columns), (Math.floor(i / columns) + 0.5) * (height / rows));
    });
    return texts.filter(Boolean).length;
  }

  function writeAxes() {
    const { rows, columns, axes } = shown;
    writeLabels(rowLabels, rows, axes?.rows.words, "top", MAX_LABELS);
    writeLabels(columnLabels, columns, axes?.columns.words, "left", tall ? wideLabels(box.clientWidth) : MAX_LABELS);
    titles.forEach((title, i) => (title.textContent = axes?.[i === 0 ? "rows" : "columns"].title ?? ""));
  }

  function choose(next) {
    at = next && shown ? { row: Math.max(0, Math.min(shown.rows - 1, next.row)), column: Math.max(0, Math.min(shown.columns - 1, next.column)) } : null;
    mark.hidden = !at;
    if (!at) return onDescribe(null);
    mark.style.left = `${(100 * at.column) / shown.columns}%`;
    mark.style.top = `${(100 * at.row) / shown.rows}%`;
    mark.style.width = `${100 / shown.columns}%`;
    mark.style.height = `${100 / shown.rows}%`;
    return onDescribe(describe(at.row, at.column), at);
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const edge = canvas.getBoundingClientRect();
    choose({
      row: Math.floor((shown.rows * (event.clientY - edge.top)) / edge.height),
      column: Math.floor((shown.columns * (event.clientX - edge.left)) / edge.width),
    });
  });
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && choose(null));
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  canvas.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || !shown || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const far = event.shiftKey ? 10 : 1;
    choose(at ? { row: at.row + far * step[0], column: at.column + far * step[1] } : { row: 0, column: 0 });
  });
  canvas.addEventListener("focus", () => at ?? choose({ row: 0, column: 0 }));
  canvas.addEventListener("blur", () => choose(null));
  const recolor = () => {
    inks = null;
    paint();
  };
  document.addEventListener("themechange", recolor);
  const observer = new ResizeObserver(() => {
    if (shown) writeAxes();
    paint();
  });
  observer.observe(box);
  return {
    show(cells, size) {
      shown = { cells, ...size };
      box.style.setProperty("--rows", String(size.rows));
      box.style.setProperty("--columns", String(size.columns));
      writeAxes();
      paint();
      if (at) choose(at);
    },
    pointed: () => at !== null,
    destroy() {
      document.removeEventListener("themechange", recolor);
      observer.disconnect();
    },
  };
}

/** Return how many times fit below a map. */
const wideLabels = (width) => Math.max(2, Math.min(MAX_LABELS, Math.floor(width / WIDE_LABEL_PX)));

/** Return at most `most` cells at equal distances among `count` cells. */
export function labelPlaces(count, most) {
  const wanted = Math.max(1, Math.ceil(count / most));
  const power = 10 ** Math.floor(Math.log10(wanted));
  const gap = [1, 2, 4, 5, 8, 10].map((factor) => factor * power).find((one) => one >= wanted) ?? wanted;
  return Array.from({ length: Math.ceil(count / gap) }, (_, i) => i * gap);
}

function writeLabels(place, count, words, side, most) {
  const labels = (words ? labelPlaces(count, most) : []).map((cell) => {
    const one = el("span", {}, words(cell));
    one.style[side] = `${(100 * (cell + 0.5)) / count}%`;
    return one;
  });
  place.replaceChildren(...labels);
}

/** Show the color scale: its quantity, and the values at the start, the middle and the end. Colors follow the square root. */
export function legend(place, most, words, token = "--axis-dp", quantity = "") {
  const bar = el("span", { className: "heat-scale", ariaHidden: "true" });
  bar.style.setProperty("--swatch", `var(${token})`);
  const ends = [0, atShare(0.5, most), most].map((value) => el("span", {}, words(value)));
  const title = quantity ? el("p", { className: "note" }, `Color scale: ${quantity}, square-root scale`) : null;
  place.replaceChildren(el("div", { className: "heat-legend" }, title, bar, el("div", { className: "heat-ends" }, ...ends)));
}
