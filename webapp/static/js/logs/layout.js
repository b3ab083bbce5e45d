// Which lines of a long list are in sight: heights in rows, and places in pixels. Pure.

const TALLEST = 16_000_000; // px; browsers draw no element that is much taller

/** Rows that a text of so many characters takes where `columns` fit; null columns: nothing is wrapped. */
export const rowsOf = (length, columns) => (columns === null ? 1 : Math.max(1, Math.ceil(length / columns)));

export class Layout {
  constructor(rowHeight) {
    this.rowHeight = rowHeight;
    this.ends = []; // of each line, in rows from the top
  }

  get length() {
    return this.ends.length;
  }

  get rows() {
    return this.ends.length > 0 ? this.ends[this.ends.length - 1] : 0;
  }

  /** How tall the list is on the page. */
  get height() {
    return Math.min(TALLEST, this.rows * this.rowHeight);
  }

  /** How many of the list's own pixels go by with one of the page's. */
  get #scale() {
    return Math.max(1, (this.rows * this.rowHeight) / TALLEST);
  }

  /** Lines from `from` on have these heights; what was there is forgotten. */
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

  /** A line turned out to be of another height. */
  correct(index, rows) {
    const change = rows - (this.ends[index] - this.startOf(index));
    if (change) for (let i = index; i < this.ends.length; i += 1) this.ends[i] += change;
    return change;
  }

  startOf(index) {
    return index > 0 ? this.ends[index - 1] : 0;
  }

  /** Where to scroll to, for a line to stand `above` pixels below the upper edge. */
  scrollTo(index, above = 0) {
    return (this.startOf(index) * this.rowHeight - above) / this.#scale;
  }

  /** {first, last, top}: lines in sight and `beyond` rows on either side, and where the first one goes. */
  inSight(scrollTop, viewHeight, beyond) {
    const at = (scrollTop * this.#scale) / this.rowHeight;
    const first = this.lineAt(at - beyond);
    const last = this.lineAt(at + viewHeight / this.rowHeight + beyond);
    return { first, last, top: scrollTop - (at - this.startOf(first)) * this.rowHeight };
  }

  /** The line at so many rows from the top. */
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
