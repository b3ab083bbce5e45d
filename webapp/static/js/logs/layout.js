// Layout of a long list: heights in rows, places in pixels, visible lines. Pure.

const TALLEST = 16_000_000; // px, close to the limit of browsers

/** Return the rows of a text with `length` characters. Null `columns` mean no wrapping. */
export const countRows = (length, columns) => (columns === null ? 1 : Math.max(1, Math.ceil(length / columns)));

export class Layout {
  constructor(rowHeight) {
    this.rowHeight = rowHeight;
    this.ends = []; // end of each line, in rows from the top
  }

  get length() {
    return this.ends.length;
  }

  get rows() {
    return this.ends.length > 0 ? this.ends[this.ends.length - 1] : 0;
  }

  /** Return the height of the list on the page. */
  get height() {
    return Math.min(TALLEST, this.rows * this.rowHeight);
  }

  /** Return the pixels of the list per pixel of the page. */
  get #scale() {
    return Math.max(1, (this.rows * this.rowHeight) / TALLEST);
  }

  /** Replace the heights of all lines from `from` on. */
  put(from, heights) {
    this.ends.length = from;
    let end = this.rows;
    for (const rows of heights) this.ends.push((end += rows));
  }

  drop(count) {
    const gone = count > 0 ? this.ends[count - 1] : 0;
    this.ends.splice(0, count);
    if (gone > 0) for (let i = 0; i < this.ends.length; i += 1) this.ends[i] -= gone;
    return gone * this.rowHeight;
  }

  /** Correct the height of a line. */
  correct(index, rows) {
    const change = rows - (this.ends[index] - this.getStart(index));
    if (change) for (let i = index; i < this.ends.length; i += 1) this.ends[i] += change;
    return change;
  }

  getStart(index) {
    return index > 0 ? this.ends[index - 1] : 0;
  }

  /** Return the scroll offset that places a line `above` pixels below the upper edge. */
  scrollTo(index, above = 0) {
    return (this.getStart(index) * this.rowHeight - above) / this.#scale;
  }

  /** Return {first, last, top}: visible lines with `beyond` extra rows on both sides, and the top of the first line. */
  inSight(scrollTop, viewHeight, beyond) {
    const at = (scrollTop * this.#scale) / this.rowHeight;
    const first = this.lineAt(at - beyond);
    const last = this.lineAt(at + viewHeight / this.rowHeight + beyond);
    return { first, last, top: scrollTop - (at - this.getStart(first)) * this.rowHeight };
  }

  /** Return the line at a row. */
  lineAt(row) {
    let low = 0;
    let high = this.ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > row) high = middle;
      else low = middle + 1;
    }
    return Math.max(0, low);
  }
}
