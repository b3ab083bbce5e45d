// Searches lines with a regular expression, in a worker with a time limit, because a slow expression would block the page.
import { getText } from "./lines.js";

const CHUNK = 2000; // lines per request
const PATIENCE_MS = 1000; // per request

/** Compile an expression. Without capital letters the search ignores case. */
export function parseExpression(text) {
  try {
    const flags = /[A-Z]/.test(text.replace(/\\./g, "")) ? "gu" : "giu";
    return { source: text, flags, problem: "", expression: new RegExp(text, flags) };
  } catch (error) {
    return { source: "", flags: "", problem: words(error.message) };
  }
}

const words = (message) => `Invalid expression: ${message.replace(/^Invalid regular expression: (?:\/.*\/\w*: )?/, "").toLowerCase()}`;

/** A search of the lines of a view. `onChange()` is called after each change. */
export class Search {
  constructor(onChange) {
    this.onChange = onChange;
    this.problem = "";
    this.source = "";
    this.flags = "";
    this.#forget();
  }

  #forget() {
    this.hits = new Map(); // index -> ranges
    this.places = []; // indices of hits, in order
    this.scanned = 0;
  }

  get active() {
    return this.source !== "" && this.problem === "";
  }

  get done() {
    return !this.active || this.scanned >= this.lines.length;
  }

  /** Start a search. */
  begin(text, lines) {
    this.#stop();
    this.#forget();
    this.lines = lines;
    const { source, flags, problem } = text ? parseExpression(text) : { source: "", flags: "", problem: "" };
    Object.assign(this, { source, flags, problem });
    this.#ask();
  }

  /** Search new lines from `from` on, after `dropped` lines went at the start. */
  follow(from, dropped) {
    if (!this.active) return;
    if (dropped > 0 || from < this.scanned) {
      const remaining = this.places.map((place) => place - dropped).filter((place) => place >= 0 && place < from);
      this.hits = new Map(remaining.map((place) => [place, this.hits.get(place + dropped)]));
      this.places = remaining;
      this.scanned = Math.max(0, Math.min(this.scanned - dropped, from));
      this.#stop(); // the lines of the request moved
    }
    if (this.request === undefined) this.#ask();
  }

  #ask() {
    if (this.done) {
      this.onChange();
      return;
    }
    this.worker ??= this.#hire();
    const from = this.scanned;
    const texts = this.lines.slice(from, from + CHUNK).map(getText);
    this.request = { id: (this.request?.id ?? this.last ?? 0) + 1, from, count: texts.length };
    this.last = this.request.id;
    this.timer = setTimeout(() => this.#giveUp(), PATIENCE_MS);
    this.worker.postMessage({ id: this.request.id, source: this.source, flags: this.flags, texts });
  }

  #hire() {
    const worker = new Worker(new URL("./finder.js", import.meta.url));
    worker.onmessage = ({ data }) => this.#take(data);
    worker.onerror = () => this.#giveUp();
    return worker;
  }

  #take({ id, hits }) {
    if (id !== this.request?.id) return;
    clearTimeout(this.timer);
    const { from, count } = this.request;
    for (const [index, ranges] of hits) {
      this.hits.set(from + index, ranges);
      this.places.push(from + index);
    }
    this.scanned = from + count;
    this.request = undefined;
    this.onChange();
    this.#ask();
  }

  #giveUp() {
    const { from, count } = this.request;
    this.#stop();
    this.problem = `Search stopped: lines ${from + 1} to ${from + count} took more than ${PATIENCE_MS / 1000} s. Use a simpler expression.`;
    this.onChange();
  }

  /** Stop a worker that has an open request. */
  #stop() {
    clearTimeout(this.timer);
    if (this.request === undefined) return;
    this.worker?.terminate();
    this.worker = undefined;
    this.request = undefined;
  }
}
