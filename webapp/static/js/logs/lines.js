// Log lines by rank, and views of one rank or of all ranks by time. Pure.
import { plain } from "./ansi.js";
import { LEVELS, findLevel } from "./levels.js";

export const MOST_LINES = 100_000; // of all ranks together
export const MOST_CHARACTERS = 32_000_000;

/** Return the key of a log. The launcher of node 0 has -1, that of node 1 has -2. */
export const logKey = (rank, node) => (rank < 0 ? -1 - node : rank);

/** Return the text of a line as a terminal shows it. */
export const getText = (line) => (line.skipped === undefined ? plain(line.text) : `… ${line.skipped} lines not stored …`);

/**
 * Add the lines of an item to `logs` (rank -> {node, lines, open, start, next, characters}). `start` lines were dropped.
 * `open` holds the lines after them that can still change, for example a progress bar.
 */
export function foldLog(logs, item, node) {
  const key = logKey(item.rank, node);
  if (!logs.has(key)) logs.set(key, { node, lines: [], open: [], start: 0, next: 0, total: 0, characters: 0, carry: {} });
  const log = logs.get(key);
  const { time } = item;
  const skipped = Math.max(item.first - log.next, item.skipped ?? 0);
  if (skipped > 0) log.lines.push({ rank: key, time, number: item.first, skipped, level: "warning" });
  const seen = Math.max(0, log.next - item.first);
  for (let i = seen; i < item.lines.length; i += 1) {
    const text = item.lines[i];
    log.lines.push({ rank: key, time, number: item.first + i, text, level: findLevel(plain(text), log.carry) });
    log.characters += text.length;
  }
  const end = item.first + item.lines.length;
  if (end >= log.next) {
    const makeLine = (text, i) => ({ rank: key, time, number: end + i, text, level: findLevel(plain(text), { ...log.carry }) });
    log.open = (item.open ?? []).map(makeLine);
  }
  log.next = Math.max(log.next, end);
  log.total = log.next;
  bound(logs);
}

/** Drop the oldest eighth of the lines of the longest log, until the limits hold. */
function bound(logs) {
  const over = () => {
    let lines = 0;
    let characters = 0;
    for (const log of logs.values()) {
      lines += log.lines.length;
      characters += log.characters;
    }
    return lines > MOST_LINES || characters > MOST_CHARACTERS;
  };
  while (over()) {
    const longest = [...logs.values()].reduce((a, b) => (weight(b) > weight(a) ? b : a));
    const gone = longest.lines.splice(0, Math.max(1, longest.lines.length >> 3));
    longest.start += gone.length;
    for (const line of gone) longest.characters -= line.text?.length ?? 0;
  }
}

const weight = (log) => log.lines.length / MOST_LINES + log.characters / MOST_CHARACTERS;

/** Lines of `rank` (null: all ranks, by time) with at least `level`. */
export class View {
  constructor(rank, level = "info") {
    this.rank = rank;
    this.least = LEVELS.indexOf(level);
    this.lines = [];
    this.taken = new Map(); // rank -> number of lines read
    this.open = []; // lines at the end that can still change
  }

  /** Add new lines. Return {from, dropped, fresh, removed}: first changed index, lines dropped at the start, new and removed lines. */
  pull(logs) {
    const fresh = [];
    const open = [];
    for (const [rank, log] of logs) {
      if (this.rank !== null && rank !== this.rank) continue;
      const end = log.start + log.lines.length;
      for (let i = Math.max(this.taken.get(rank) ?? 0, log.start); i < end; i += 1) {
        const line = log.lines[i - log.start];
        if (LEVELS.indexOf(line.level) >= this.least) fresh.push(line);
      }
      this.taken.set(rank, end);
      for (const line of log.open ?? []) if (LEVELS.indexOf(line.level) >= this.least) open.push(line);
    }
    const isSame = open.length === this.open.length && open.every((line, i) => line === this.open[i]);
    if (fresh.length === 0 && isSame) return { from: this.lines.length, dropped: 0, fresh: 0, removed: 0 };
    const removed = this.lines.splice(this.lines.length - this.open.length).length;
    const from = fresh.length > 0 ? this.#insert(fresh) : this.lines.length;
    this.open = open;
    this.lines.push(...open);
    const dropped = Math.max(0, this.lines.length - MOST_LINES);
    if (dropped > 0) this.lines.splice(0, dropped);
    return { from: Math.max(0, from - dropped), dropped, fresh: fresh.length, removed };
  }

  /** Insert new lines by time and return the first changed index. A new line may be older than the last line. */
  #insert(fresh) {
    if (this.rank === null) fresh.sort((a, b) => a.time - b.time);
    let from = this.lines.length;
    if (this.rank === null) while (from > 0 && this.lines[from - 1].time > fresh[0].time) from -= 1;
    const tail = this.lines.splice(from);
    const merged = tail.length > 0 ? [...tail, ...fresh].sort((a, b) => a.time - b.time) : fresh;
    for (const line of merged) this.lines.push(line);
    return from;
  }
}
