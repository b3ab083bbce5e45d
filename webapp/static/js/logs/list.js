// A long list of lines that keeps only visible lines in the page.
import { el } from "../dom.js";
import { refill } from "../refill.js";
import { segments } from "./ansi.js";
import { Layout, countRows } from "./layout.js";
import { getText } from "./lines.js";

const BEYOND = 12; // extra rows above and below the visible rows
const PROBE = 100; // characters measured together
const NEAR_END = 4; // px

export const makeId = (line) => `log-${line.rank}-${line.number + 1}`;

/** The list. `formatName(rank)` labels lines of all ranks. `scrolled(atEnd)` is called when the reader scrolls. */
export class LineList {
  constructor(box, { formatName, scrolled }) {
    this.box = box;
    this.formatName = formatName;
    this.space = el("div", { className: "log-space" });
    this.rows = el("div", { className: "log-rows" });
    this.space.append(this.rows);
    this.box.replaceChildren(this.space);
    this.wrap = true;
    this.marked = null; // id of the line in the address
    this.lines = [];
    this.hits = new Map();
    this.current = null; // line of the current match
    this.layout = new Layout(this.#measure().rowHeight);
    this.set = { top: 0 }; // last offset set by this class
    box.addEventListener("scroll", () => {
      if (Math.abs(box.scrollTop - this.set.top) > 1) scrolled(this.atEnd);
      this.set.top = box.scrollTop;
      this.draw();
    });
    new ResizeObserver(() => this.resized()).observe(box);
  }

  get atEnd() {
    return this.box.scrollTop + this.box.clientHeight >= this.space.offsetHeight - NEAR_END;
  }

  /** Show other lines, or change the wrapping. */
  show(lines, { wrap, ofAll }) {
    this.lines = lines;
    this.wrap = wrap;
    this.box.dataset.wrap = String(wrap);
    this.box.dataset.all = String(ofAll);
    this.layout = new Layout(this.#measure().rowHeight);
    this.changed(0, 0);
  }

  /** Update lines from `from` on, after `dropped` lines went. The visible text keeps its place. */
  changed(from, dropped) {
    const gone = this.layout.drop(dropped);
    const { columns } = this.#measure();
    const heights = [];
    for (let i = from; i < this.lines.length; i += 1) heights.push(countRows(getText(this.lines[i]).length, columns));
    this.layout.put(from, heights);
    this.space.style.setProperty("height", `${this.layout.height}px`);
    if (gone > 0) this.#scroll(this.box.scrollTop - gone);
    this.draw();
  }

  resized() {
    const { columns, rowHeight } = this.#measure();
    if (columns === this.columns && rowHeight === this.layout.rowHeight) return this.draw();
    const at = this.layout.inSight(this.box.scrollTop, 0, 0).first;
    const { atEnd } = this;
    this.layout = new Layout(rowHeight);
    this.changed(0, 0);
    if (atEnd) this.toEnd();
    else this.#scroll(this.layout.scrollTo(at));
    return this.draw();
  }

  toEnd() {
    this.#scroll(this.space.offsetHeight);
    this.draw();
    if (!this.atEnd) this.#scroll(this.space.offsetHeight); // drawing corrected the height of lines
  }

  /** Scroll a line to the middle. */
  toLine(index) {
    this.#scroll(this.layout.scrollTo(index, this.box.clientHeight / 2));
    this.draw();
    this.#scroll(this.layout.scrollTo(index, this.box.clientHeight / 2));
    this.draw();
  }

  #scroll(top) {
    this.box.scrollTop = top;
    this.set.top = this.box.scrollTop;
  }

  /** Measure the characters per row (null without wrapping) and the height of a row. */
  #measure() {
    const text = el("span", { className: "log-text" }, "0".repeat(PROBE));
    const row = el("div", { className: "log-line log-probe" }, ...this.#before({ rank: 0, number: 0 }), text);
    this.rows.append(row);
    const wide = text.getBoundingClientRect().width / PROBE;
    const left = text.getBoundingClientRect().left - row.getBoundingClientRect().left;
    const rowHeight = row.getBoundingClientRect().height || 20;
    row.remove();
    const columns = this.wrap && wide > 0 ? Math.max(10, Math.floor((this.box.clientWidth - left - 1) / wide)) : null;
    this.columns = columns;
    return { columns, rowHeight };
  }

  draw() {
    if (this.lines.length === 0 || this.box.clientHeight === 0) {
      this.rows.replaceChildren();
      return;
    }
    const first = this.#place();
    if (this.columns !== null && this.#correct(first)) this.#place();
  }

  /** Place the visible lines and return the index of the first one. */
  #place() {
    const { first, last, top } = this.layout.inSight(this.box.scrollTop, this.box.clientHeight, BEYOND);
    const drawn = [];
    for (let i = first; i <= last; i += 1) drawn.push(this.#row(i));
    this.rows.style.setProperty("transform", `translateY(${top}px)`);
    refill(this.rows, ...drawn);
    return first;
  }

  /** Correct lines that wide characters make taller. The visible text keeps its place. */
  #correct(first) {
    const { layout } = this;
    const read = layout.inSight(this.box.scrollTop, 0, 0).first;
    const before = layout.scrollTo(read);
    const heights = [...this.rows.children].map((row) => Math.max(1, Math.round(row.getBoundingClientRect().height / layout.rowHeight)));
    const changed = heights.map((rows, i) => layout.correct(first + i, rows)).some((change) => change !== 0);
    if (!changed) return false;
    this.space.style.setProperty("height", `${layout.height}px`);
    this.#scroll(this.box.scrollTop + layout.scrollTo(read) - before);
    return true;
  }

  #before(line) {
    const number = el("a", { className: "log-number", href: `#${makeId(line)}`, tabIndex: -1 }, String(line.number + 1));
    return [number, el("span", { className: "log-rank" }, this.formatName(line.rank))];
  }

  #row(index) {
    const line = this.lines[index];
    const text = el("span", { className: "log-text" });
    if (line.skipped !== undefined) text.append(getText(line));
    else for (const piece of pieces(segments(line.text), this.hits.get(index) ?? [])) text.append(piece);
    const row = el("div", { className: "log-line" }, ...this.#before(line), text);
    row.dataset.level = line.level;
    row.dataset.key = `${makeId(line)}${line.skipped === undefined ? "" : " skipped"}`;
    if (line.skipped === undefined) row.id = makeId(line);
    else row.classList.add("skipped");
    if (line === this.current) row.dataset.current = "";
    if (row.id && this.marked === row.id) row.dataset.marked = "";
    return row;
  }
}

/** Return the nodes of a line: segments, split at matches. */
function pieces(parts, ranges) {
  const nodes = [];
  let at = 0;
  let next = 0;
  for (const { text, classes } of parts) {
    let from = 0;
    while (from < text.length) {
      while (next < ranges.length && ranges[next][1] <= at + from) next += 1;
      const [begin, end] = ranges[next] ?? [Infinity, Infinity];
      const inside = begin <= at + from;
      const to = Math.min(text.length, (inside ? end : begin) - at);
      nodes.push(el(inside ? "mark" : "span", { className: classes }, text.slice(from, to)));
      from = to;
    }
    at += text.length;
  }
  return nodes;
}
