// Numbers and times as text, units included. Pure functions.

const IEC = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const SI = ["", "k", "M", "G", "T", "P", "E"];
const MISSING = "–";
const MIN_DAYS = 2; // shorter durations are in hours
const group = new Intl.NumberFormat("en-US");

function scaled(value, base) {
  let power = 0;
  let rest = Math.abs(value);
  // 999.5 would round to 1000, which belongs to the next unit.
  while (rest >= base - 0.5 && power < SI.length - 1) {
    rest /= base;
    power += 1;
  }
  return [Math.sign(value) * rest, power];
}

function threeDigits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return value.toFixed(0);
  if (size >= 9.995) return value.toFixed(1);
  return value.toFixed(2);
}

const upTo4 = (value) => String(Number(value.toPrecision(4)));
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Format memory in powers of 1024: 1536 -> "1.50 KiB". */
export function bytes(value) {
  if (!known(value)) return MISSING;
  const [rest, power] = scaled(value, 1024);
  return `${power === 0 ? String(Math.round(rest)) : threeDigits(rest)} ${IEC[power]}`;
}

/** 1536 -> "1,536 B", for exact comparisons. */
export function exactBytes(value) {
  return known(value) ? `${group.format(value)} B` : MISSING;
}

/** "1 rank", "1,200 ranks". */
export function counted(value, one, many = `${one}s`) {
  return `${integer(value)} ${value === 1 ? one : many}`;
}

/** Format signed exact bytes: "+12 B", "0 B", "−3 B". */
export function difference(value) {
  if (!known(value)) return MISSING;
  if (value === 0) return "0 B";
  return `${value > 0 ? "+" : "−"}${group.format(Math.abs(value))} B`;
}

/** Format traffic in powers of 1000, the unit of link rates: "10.0 GB". */
export function decimalBytes(value) {
  if (!known(value)) return MISSING;
  const [rest, power] = scaled(value, 1000);
  return `${threeDigits(rest)} ${SI[power]}B`;
}

/** Format a rate in powers of 1000, as nccl-tests do: "1.25 GB/s". */
export function byteRate(value) {
  if (!known(value)) return MISSING;
  const [rest, power] = scaled(value, 1000);
  return `${threeDigits(rest)} ${SI[power]}B/s`;
}

/** 124439808 -> "124M". */
export function count(value) {
  if (!known(value)) return MISSING;
  const [rest, power] = scaled(value, 1000);
  return power === 0 ? upTo4(rest) : `${threeDigits(rest)}${SI[power]}`;
}

/** Format floating-point operations: 5e10 -> "50.0 GFLOP". */
export function operations(value) {
  if (!known(value)) return MISSING;
  const [rest, power] = scaled(value, 1000);
  return power === 0 ? `${upTo4(rest)} FLOP` : `${threeDigits(rest)} ${SI[power]}FLOP`;
}

/** Format a number of parameters: 405853388800 -> "406B". */
export function parameters(value) {
  return count(value).replace("G", "B");
}

/** 124439808 -> "124,439,808". */
export function integer(value) {
  return known(value) ? group.format(value) : MISSING;
}

/** 12345.6 -> "12.3k tokens/s". */
export function tokenRate(value) {
  return known(value) ? `${count(value >= 1000 ? value : Number(threeDigits(value)))} tokens/s` : MISSING;
}

export function sampleRate(value) {
  return known(value) ? `${count(value >= 1000 ? value : Number(threeDigits(value)))} samples/s` : MISSING;
}

/** Format seconds: "1.23 ms", "4.50 s", "3 min 05 s", "2 h 04 min". */
export function duration(seconds) {
  if (!known(seconds) || seconds < 0) return MISSING;
  if (seconds < 999.5e-6) return `${threeDigits(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${threeDigits(seconds * 1e3)} ms`;
  if (seconds < 60) return `${threeDigits(seconds)} s`;
  const whole = Math.round(seconds);
  const two = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < MIN_DAYS * 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Format the margin of error: "±19%", or above 100% "within a factor of 5". */
export function sureness(share) {
  return share > 1 ? `within a factor of ${Number((1 + share).toPrecision(2))}` : `±${Math.round(100 * share)}%`;
}

/** Shorten a text in the middle: "pretrain-llama…-seed-42". */
export function shortened(text, most) {
  const letters = [...text];
  const head = Math.ceil((most - 1) / 2);
  return letters.length > most ? [...letters.slice(0, head), "…", ...letters.slice(head + 1 - most)].join("") : text;
}

/** Format the interval of an estimate, with `shown` for each end: "0.8 s to 1.2 s". */
export function between(shown, value, share) {
  const off = Math.max(0.01, share);
  return `${shown(value * (off > 1 ? 1 / (1 + off) : 1 - off))} to ${shown(value * (1 + off))}`;
}

/** Format milliseconds with three digits and the unit. */
export function milliseconds(seconds) {
  return known(seconds) ? `${threeDigits(seconds * 1e3)} ms` : MISSING;
}

/** Format a loss: "3.1416", or "2.49e+5" if the run diverges. */
export function loss(value, digits = 4) {
  if (!known(value)) return MISSING;
  return Math.abs(value) < 1e4 ? value.toFixed(digits) : value.toExponential(2);
}

/** Format measured / predicted. Only equal values give "1.0000". */
export function ratio(measured, predicted) {
  if (!known(measured) || !known(predicted)) return MISSING;
  if (predicted === 0) return measured === 0 ? "1.0000" : "∞";
  const words = (measured / predicted).toFixed(4);
  if (words !== "1.0000" || measured === predicted) return words;
  return measured > predicted ? "> 1" : "< 1";
}

/** @type {Intl.DateTimeFormatOptions} */
const MINUTES = { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", timeZoneName: "short" };
const minuteFormat = new Intl.DateTimeFormat("en-GB", MINUTES);
const secondFormat = new Intl.DateTimeFormat("en-GB", { ...MINUTES, second: "2-digit" });

/** Format a Date in the reader's time zone: "22 Nov 2026 03:04 UTC". */
export function dateTime(date) {
  return minuteFormat.format(date).replace(",", "");
}

/** Format a Date with seconds in the reader's time zone: "22 Nov 2026 03:04:09 UTC". */
export function exactTime(date) {
  return secondFormat.format(date).replace(",", "");
}

/** Format a Date after another one: "03:04:09" if the day and the zone are equal. */
export function timeAfter(before, date) {
  const [was, is] = [before, date].map((one) => secondFormat.formatToParts(one));
  const part = (parts, type) => parts.find((one) => one.type === type).value;
  const same = ["year", "month", "day", "timeZoneName"].every((type) => part(was, type) === part(is, type));
  return same ? ["hour", "minute", "second"].map((type) => part(is, type)).join(":") : exactTime(date);
}

/** Format the age of a Date: "12 s ago", "2 h 04 min ago", "3 days ago". */
export const ago = (date, now = new Date()) => agoBy((now.getTime() - date.getTime()) / 1000);

/** Format an age in seconds: "12 s ago". */
export function agoBy(seconds) {
  if (seconds < 1) return "just now";
  const days = Math.floor(seconds / 86_400);
  if (days >= 2) return `${days} days ago`;
  return seconds < 60 ? `${Math.floor(seconds)} s ago` : `${duration(Math.floor(seconds))} ago`;
}

const OP_NAMES = {
  all_reduce: "all-reduce",
  all_gather: "all-gather",
  reduce_scatter: "reduce-scatter",
  all_to_all: "all-to-all",
  send_recv: "send/recv",
  isend_irecv: "isend/irecv",
};

/** Format the name of a collective: "all-reduce". */
export function opName(op) {
  return OP_NAMES[op] ?? op;
}

/** Format measured minus planned as a signed percentage of planned. Only equal values give "0%". */
export function relativeDifference(planned, measured) {
  if (planned === measured) return "0%";
  if (!(planned > 0)) return "–";
  const share = (100 * (measured - planned)) / planned;
  if (!Number.isFinite(share)) return "–";
  const size = Math.abs(share);
  if (size < 0.05) return "< 0.1%";
  return `${share > 0 ? "+" : "−"}${size < 10 ? size.toFixed(1) : size.toFixed(0)}%`;
}
