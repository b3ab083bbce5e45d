// Bytes of each rank in bins of time, from cumulative counters. Pure; unix seconds.

/**
 * A row of bins of equal width per (rank, key). The sum over all bins is every byte added (until `recent`
 * bins are let go), so a graph drawn from it integrates to the counters.
 */
export class Bins {
  /** `mode`: "recent" lets the oldest go beyond `capacity`; "whole" doubles the width instead. */
  constructor(width, capacity, mode) {
    this.width = width;
    this.capacity = capacity;
    this.mode = mode;
    /** @type {any} */
    this.start = null; // index of bin 0 in units of width
    this.length = 0;
    this.rows = new Map(); // rank -> key -> number[]
    this.holes = new Set(); // absolute bin indices in which history is missing
  }

  /** Time passes for every rank: bins up to `time` exist, empty ones reading 0. */
  advance(time) {
    const bin = Math.floor(time / this.width);
    if (this.start === null) this.start = bin;
    if (bin < this.start && this.mode === "whole") this.#reachBack(this.start - bin); // bins may be wider from here on
    else if (bin >= this.start + this.length) this.#reachOn(bin);
  }

  #reachOn(bin) {
    this.length = bin - this.start + 1;
    if (this.length <= this.capacity) return;
    if (this.mode === "recent") this.#dropOldest(this.length - this.capacity);
    else while (this.length > this.capacity) this.#halve();
  }

  add(rank, key, time, amount) {
    this.advance(time);
    const index = Math.floor(time / this.width) - this.start;
    if (index < 0) return;
    if (!this.rows.has(rank)) this.rows.set(rank, new Map());
    const keys = this.rows.get(rank);
    if (!keys.has(key)) keys.set(key, []);
    const row = keys.get(key);
    row[index] = (row[index] ?? 0) + amount;
  }

  /** From `from` to `to` nothing is known: the graph shows a break, not a zero. */
  hole(from, to) {
    this.advance(to);
    for (let bin = Math.floor(from / this.width); bin <= Math.floor(to / this.width); bin += 1) this.holes.add(bin);
  }

  /** Bin starts, in unix seconds. */
  times() {
    return Array.from({ length: this.length }, (_, i) => (this.start + i) * this.width);
  }

  /** Bytes a second per bin for one rank over the keys accepted; null inside a hole. */
  rate(rank, accepts) {
    const sums = new Array(this.length).fill(0);
    for (const [key, row] of this.rows.get(rank) ?? []) {
      if (!accepts(key)) continue;
      for (let i = 0; i < row.length; i += 1) if (row[i]) sums[i] += row[i] / this.width;
    }
    for (const bin of this.holes) {
      const index = bin - this.start;
      if (index >= 0 && index < this.length) sums[index] = null;
    }
    return sums;
  }

  // A member's stream may begin before the one that was read first.
  #reachBack(number) {
    this.start -= number;
    this.length += number;
    for (const keys of this.rows.values()) for (const row of keys.values()) row.unshift(...new Array(number).fill(0));
    while (this.length > this.capacity) this.#halve();
  }

  #dropOldest(number) {
    this.start += number;
    this.length -= number;
    for (const keys of this.rows.values()) for (const row of keys.values()) row.splice(0, number);
    for (const bin of this.holes) if (bin < this.start) this.holes.delete(bin);
  }

  #halve() {
    const start = Math.floor(this.start / 2);
    const shift = this.start - 2 * start;
    const length = Math.ceil((this.length + shift) / 2);
    for (const keys of this.rows.values()) {
      for (const [key, row] of keys) {
        const merged = [];
        row.forEach((amount, i) => {
          const to = Math.floor((i + shift) / 2);
          merged[to] = (merged[to] ?? 0) + amount;
        });
        keys.set(key, merged);
      }
    }
    this.holes = new Set([...this.holes].map((bin) => Math.floor(bin / 2)));
    Object.assign(this, { start, length, width: 2 * this.width });
  }
}
