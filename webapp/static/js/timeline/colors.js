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

/** The token of an axis; groups of a script, or of a file, that are none take series in order. */
export function axisToken(axis, others) {
  if (AXES.includes(axis)) return `--axis-${axis}`;
  if (!others.includes(axis)) others.push(axis);
  return `--series-${(others.indexOf(axis) + 3) % SERIES}`;
}

/** The token of a span: forward and backward by micro-batch. */
export function workToken(span) {
  if (WORK[span.work]) return WORK[span.work];
  return span.micro < 0 ? "--part-compute" : `--series-${span.micro % SERIES}`;
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
