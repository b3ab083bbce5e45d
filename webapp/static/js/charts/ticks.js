// Where the ticks of a time axis stand, and what they say: the time of day, or the optimiser step.
import { integer } from "../format.js";

export const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];
const timeFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const zoneFormat = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" });
const zoneOf = (date) => zoneFormat.formatToParts(date).find(({ type }) => type === "timeZoneName").value;

/** The time of day; the first tick of each day has its date below, and the first of all, or of another zone, its zone. */
export function clockTicks(_, ticks) {
  let [day, zone] = ["", ""];
  return ticks.map((tick) => {
    const date = new Date(tick * 1000);
    const before = [day, zone];
    [day, zone] = [dayFormat.format(date), zoneOf(date)];
    const isFirst = zone !== before[1];
    const below = [day !== before[0] || isFirst ? day : "", isFirst ? zone : ""].filter(Boolean).join(" ");
    return below ? `${timeFormat.format(date)}\n${below}` : timeFormat.format(date);
  });
}

/** Of ascending `times`, the place before which `time` would stand. */
export function placeOf(times, time) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The step that had ended at a time, null before the first; `curve`: {time, step}, both ascending. */
export function stepAt(curve, time) {
  const place = placeOf(curve.time, time);
  if (curve.time[place] === time) return curve.step[place];
  return place > 0 ? curve.step[place - 1] : null;
}

const timeOf = (curve, step) => {
  const place = Math.min(placeOf(curve.step, step), curve.step.length - 1);
  return curve.time[place];
};

function roundStep(least) {
  const size = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((factor) => factor * size).find((step) => step >= least);
}

/** Ticks at round steps between two times, at most `most` of them: [{time, words}]. */
export function stepTicks(curve, from, to, most) {
  const [first, last] = [placeOf(curve.time, from), placeOf(curve.time, to + 1e-6) - 1];
  if (last < first) return [];
  const gap = roundStep((curve.step[last] - curve.step[first]) / Math.max(1, most));
  const ticks = [];
  for (let step = Math.ceil(curve.step[first] / gap) * gap; step <= curve.step[last]; step += gap) {
    ticks.push({ time: timeOf(curve, step), words: integer(step) });
  }
  return ticks;
}

/** Words of a logarithmic axis' ticks: of the round ones alone, or of all where none is round. */
export const roundTicks = (isRound, format) => (_, ticks) => {
  const some = ticks.some((tick) => tick && isRound(tick));
  return ticks.map((tick) => (tick && (!some || isRound(tick)) ? format(tick) : ""));
};

const MOST_LETTERS = 8; // that stand beside an axis

/**
 * Words of a value axis' ticks. Where `format` makes two of them alike: plain numbers that tell them apart, if they fit;
 * else the lowest, and how much more the others are.
 */
export const tickWords = (format) => (_, ticks) => {
  const told = ticks.filter((tick) => tick !== null);
  const words = told.map(format);
  const chosen = new Set(words).size === words.length ? words : (plainWords(told) ?? aboveLowest(told, format));
  return ticks.map((tick) => (tick === null ? "" : chosen[told.indexOf(tick)]));
};

function plainWords(ticks) {
  const [gap, most] = [Math.abs(ticks[1] - ticks[0]), Math.max(...ticks.map(Math.abs))];
  const place = (value) => Math.floor(Math.log10(value) + 1e-9);
  const extreme = most < 1e-3 || most >= 1e6;
  const plain = ticks.map((tick) => (extreme ? tick.toExponential(Math.max(0, place(most) - place(gap))) : tick.toFixed(Math.max(0, -place(gap)))));
  return plain.every((one) => one.length <= MOST_LETTERS) ? plain : null;
}

function aboveLowest(ticks, format) {
  const lowest = Math.min(...ticks);
  const more = (value) => (value < 1e-3 ? value.toExponential() : String(value));
  return ticks.map((tick) => (tick === lowest ? format(tick) : `+${more(Number((tick - lowest).toPrecision(2)))}`));
}
