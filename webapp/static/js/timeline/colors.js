// Which colour says what in a timeline: axes as everywhere, micro-batches in the order of series, other work by kind.
import { color } from "../charts/theme.js";

const AXES = ["dp", "tp", "pp", "cp", "ep", "world"];
const SERIES = 16;
const WORK = {
  data: "--part-recompute",
  weights: "--kind-w",
  optimizer: "--part-optimizer",
  checkpoint: "--part-launch",
  eval: "--series-11",
};

const others = []; // of the whole page: its pictures and tables give one axis one colour

/** The token of an axis; groups of a script, or of a file, that are none take series in order. */
export function axisToken(axis) {
  if (AXES.includes(axis)) return `--axis-${axis}`;
  if (!others.includes(axis)) others.push(axis);
  return `--series-${(others.indexOf(axis) + 3) % SERIES}`;
}

/** Whether a span has its micro-batch's colour: forward and backward. */
export const byMicro = (span) => !WORK[span.work] && span.micro >= 0;

/** The token of a span. */
export function workToken(span) {
  return byMicro(span) ? `--series-${span.micro % SERIES}` : (WORK[span.work] ?? "--part-compute");
}

/** Tokens as canvas can use them, read anew when the theme changes. */
export function palette() {
  let known = new Map();
  document.addEventListener("themechange", () => {
    known = new Map();
  });
  return (token) => {
    if (!known.has(token)) known.set(token, color(token));
    return known.get(token);
  };
}
