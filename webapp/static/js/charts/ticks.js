// Places and labels of the ticks of charts. Pure.

const DAYS = [1, 2, 5, 10, 20, 50, 100].map((days) => 86_400 * days);
const CLOCK_GAPS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, ...DAYS];
const secondFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minuteFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const zoneFormat = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" });
const getZone = (date) => zoneFormat.formatToParts(date).find(({ type }) => type === "timeZoneName")?.value ?? "";

/**
 * Times of day, without seconds if all ticks are whole minutes. The first tick of a day adds the date. The first tick of all,
 * and of another time zone, adds the zone.
 */
export function clockTicks(_, ticks) {
  let [day, zone] = ["", ""];
  const timeFormat = ticks.every((tick) => tick % 60 === 0) ? minuteFormat : secondFormat;
  return ticks.map((tick) => {
    const date = new Date(tick * 1000);
    const before = [day, zone];
    [day, zone] = [dayFormat.format(date), getZone(date)];
    const isFirst = zone !== before[1];
    const below = [day !== before[0] || isFirst ? day : "", isFirst ? zone : ""].filter(Boolean).join(" ");
    const part = tick % 1 === 0 ? "" : `.${Math.round((tick % 1) * 10)}`;
    const time = `${timeFormat.format(date)}${part}`;
    return below ? `${time}\n${below}` : time;
  });
}

const LABEL_GAP_PX = 8; // least distance between labels

/** Leave out every second tick until the labels have distance. `measure(text)` returns the width of a text in pixels. */
export function spacedTicks(ticks, { getLabels, measure, pxPerUnit }) {
  if (ticks.length < 2 || !haveOverlap(ticks, getLabels(null, ticks), measure, pxPerUnit)) return ticks;
  return spacedTicks(ticks.filter((_, index) => index % 2 === 0), { getLabels, measure, pxPerUnit });
}

/** Whether two labels touch. Labels are centered at their ticks and can have two lines. */
function haveOverlap(ticks, labels, measure, pxPerUnit) {
  const ends = []; // right edge of the last text in each line
  return labels.some((label, index) =>
    label.split("\n").some((text, line) => {
      const [center, half] = [ticks[index] * pxPerUnit, measure(text) / 2];
      const touches = center - half < (ends[line] ?? -Infinity) + LABEL_GAP_PX;
      ends[line] = center + half;
      return touches;
    }),
  );
}

/** Return the index at which to insert `time` into ascending `times`. */
export function findPlace(times, time) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the last step that ended by a time, or null before the first. `curve` is {time, step}, both ascending. */
export function stepAt(curve, time) {
  const place = findPlace(curve.time, time);
  if (curve.time[place] === time) return curve.step[place];
  return place > 0 ? curve.step[place - 1] : null;
}

/** Return the step at a time, with a fraction between two steps. The run begins at the step before the first one. */
export function findStep({ time, step, step_s: seconds }, at) {
  const place = findPlace(time, at);
  if (place === time.length) return step.at(-1);
  if (time[place] === at) return step[place];
  const [before, first] = place > 0 ? [time[place - 1], step[place - 1]] : [time[0] - (seconds?.[0] ?? 0), step[0] - 1];
  if (place === 0 && !(seconds?.[0] > 0)) return step[0];
  return first + (step[place] - first) * Math.max(0, (at - before) / (time[place] - before));
}

/** Return the time of a step, see `findStep`. */
export function findTime({ time, step, step_s: seconds }, at) {
  const place = findPlace(step, at);
  if (place === step.length) return time.at(-1);
  if (step[place] === at) return time[place];
  const [before, first] = place > 0 ? [time[place - 1], step[place - 1]] : [time[0] - (seconds?.[0] ?? 0), step[0] - 1];
  return before + (time[place] - before) * Math.max(0, (at - first) / (step[place] - first));
}

const MIN_TICKS = 3;
const DIVISORS = [1, 2, 2.5, 5];

/** Multiples of `gap` between two values. */
function multiples(gap, min, max) {
  const found = [];
  const slack = Math.min(1e-3, 1e-9 * Math.max(1, Math.abs(max / gap))); // the quotient of a clock time exceeds 1e9
  for (let n = Math.ceil(min / gap - slack); n * gap <= max + slack * gap; n += 1) found.push(Number((n * gap).toPrecision(12)));
  return found;
}

/** Round values between two others: at least three, and about `most` if that is more. */
export function valueSplits(min, max, most, gaps = roundGaps(max - min)) {
  if (!(max > min)) return [min];
  const fits = gaps.find((gap) => (max - min) / gap <= Math.max(MIN_TICKS, most)) ?? gaps[gaps.length - 1];
  let place = gaps.indexOf(fits);
  while (place > 0 && multiples(gaps[place], min, max).length < MIN_TICKS) place -= 1;
  return thinned(multiples(gaps[place], min, max), most);
}

/** Leave out every second tick while the ticks are too close and at least three remain. */
function thinned(ticks, most) {
  const isCrowded = ticks.length > most + 1 && ticks.length > 2 * (MIN_TICKS - 1);
  return isCrowded ? thinned(ticks.filter((_, index) => index % 2 === 0), most) : ticks;
}

/** Round gaps from a hundredth of a span to all of the span, ascending. */
function roundGaps(span) {
  const power = 10 ** Math.floor(Math.log10(span));
  return [0.01, 0.1, 1].flatMap((scale) => DIVISORS.map((divisor) => Number((divisor * scale * power).toPrecision(12))));
}

/** Multiples of a power of two between two values. */
export function binarySplits(min, max, most) {
  const last = Math.floor(Math.log2(Math.max(1, max - min)));
  return valueSplits(min, max, most, Array.from({ length: last + 1 }, (_, power) => 2 ** power));
}

/** Round steps between two others. */
export function stepSplits(min, max, most) {
  const gaps = roundGaps(Math.max(1, max - min)).filter((gap) => Number.isInteger(gap));
  return valueSplits(min, max, most, gaps.length > 0 ? gaps : [1]);
}

/** Round times between two others. */
export function clockSplits(min, max, most) {
  return valueSplits(min, max, most, CLOCK_GAPS_S);
}

/** Label the ticks of a logarithmic axis: only round ticks if there are three or more of them, else every tick. */
export const roundTicks = (isRound, format) => (_, ticks) => {
  const enough = ticks.filter((tick) => tick && isRound(tick)).length >= MIN_TICKS;
  return ticks.map((tick) => (tick && (!enough || isRound(tick)) ? format(tick) : ""));
};

const MOST_LETTERS = 8; // per label

/**
 * Label the ticks of a value axis. If `format` writes two ticks alike, the labels are plain numbers with more digits. If
 * those are too long, the lowest tick has its value and the other ticks have their distance from the lowest.
 */
export const tickWords = (format) => (_, ticks) => {
  const shown = ticks.filter((tick) => tick !== null);
  const words = shown.map(format);
  const chosen = new Set(words).size === words.length ? words : (plainWords(shown) ?? aboveLowest(shown, format));
  return ticks.map((tick) => (tick === null ? "" : chosen[shown.indexOf(tick)]));
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
