// Colors of a timeline: by axis and by kind of work. Forward and backward have one hue in two shades, by micro-batch.
import { color } from "../charts/theme.js";

const AXES = ["dp", "tp", "pp", "cp", "ep", "world"];
const SERIES = 16;
const WORK = {
  data: "--part-recompute",
  weights: "--kind-w",
  optimizer: "--part-optimizer",
  checkpoint: "--part-launch",
  copy: "--series-5",
  eval: "--series-11",
};

const others = []; // shared by the whole page, for one color per axis

/** Return the color token of an axis. Other groups of scripts and files take series in order. */
export function axisToken(axis) {
  if (AXES.includes(axis)) return `--axis-${axis}`;
  if (!others.includes(axis)) others.push(axis);
  return `--series-${(others.indexOf(axis) + 3) % SERIES}`;
}

const MICRO = ["--part-compute", "--part-compute-odd"]; // even and odd micro-batches, so that neighbors differ

/** The opacity of backward, of waiting, and of calls with an unknown waiting time. */
export const BACKWARD_ALPHA = 0.5;
export const WAITING_ALPHA = 0.28;
export const UNKNOWN_ALPHA = 0.65;

/** Return whether a span has the color of its micro-batch: forward and backward. */
export const byMicro = (span) => !WORK[span.work] && span.micro >= 0;

/** Return the color token of a span. */
export function workToken(span) {
  return byMicro(span) ? MICRO[span.micro % MICRO.length] : (WORK[span.work] ?? "--part-compute");
}

/** Return a function from token to canvas color that follows the theme. */
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
