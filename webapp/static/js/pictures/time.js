// Planned step time: bar and table of parts, utilization, and training time.
import { el, stackedBar } from "../dom.js";
import { between, count, duration, integer, operations, tokenRate } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const AXES = ["tp", "cp", "ep", "pp", "dp", "world"];
const TOKENS = 1e12;
const MIN_PARAMETERS = 1e8; // Smaller models are not trained on so many tokens.

const token = (name) => (AXES.includes(name) ? `--axis-${name}` : `--part-${name}`);
const label = (name) => (AXES.includes(name) ? `${name} exposed` : name);
const percent = (share) => `${(100 * share).toFixed(1)}%`;

/**
 * @param {Estimate} estimate
 */
export function timePicture(estimate) {
  const { time, cluster } = estimate;
  const parts = time.parts.filter((part) => part.seconds > 0);
  const bar = stackedBar(
    parts.map((part) => ({ token: token(part.name), value: part.seconds, title: `${label(part.name)}: ${duration(part.seconds)}` })),
    "Step time by part",
  );
  const rows = parts.map((part) =>
    el("tr", {}, rowHead(token(part.name), label(part.name)), cell(duration(part.seconds)), cell(percent(part.seconds / time.step_s))),
  );
  const isTiny = estimate.model_parameters < MIN_PARAMETERS;
  const days = TOKENS / time.tokens_per_s / 86400;
  const figures = el(
    "dl",
    { className: "figures small" },
    figure("step time", duration(time.step_s), within(time)),
    figure("MFU", percent(time.mfu), "Model FLOP/s without recomputation, divided by the peak FLOP/s of all ranks", "MFU"),
    isTiny ? null : figure("HFU", percent(time.hfu), "Model FLOP/s with recomputation, divided by the peak FLOP/s of all ranks"),
    figure("speed", tokenRate(time.tokens_per_s)),
    isTiny ? null : figure(`for ${count(TOKENS)} tokens`, days >= 2 ? `${days < 100 ? days.toFixed(1) : integer(Math.round(days))} days` : duration(days * 86400)),
  );
  const sentences = [basis(time, cluster), ...aligned(estimate), `${isTiny ? "MFU is" : "MFU and HFU are"} relative to a peak of ${peak(estimate)} per rank.`, ...beyond(estimate)];
  return [figures, bar, scrolling([th("part"), th("time", true), th("share", true)], rows), el("p", { className: "note" }, sentences.join(" "))];
}

/**
 * Describe the cost of a vocabulary whose rows are not aligned to 16 bytes.
 * @param {Estimate} estimate
 */
function aligned({ aligned_vocabulary: found, vocab_size: size }) {
  if (!found) return [];
  return [`A vocabulary size of ${integer(found.vocab_size)} saves ${duration(found.spares_s)} per step, because a size of ${integer(size)} is not aligned for matmuls.`];
}

/** Explain an HFU above 100%. Estimates of earlier versions lack `assumed_peak`. */
function beyond({ time: { hfu }, cluster: { assumed_peak: assumed } }) {
  if (hfu <= 1 || assumed !== false) return [];
  return ["MFU counts the full attention matrix, but kernels compute only its unmasked half."];
}

/** Return the peak of a rank, which is 100% of MFU. */
function peak({ time, world_size: ranks }) {
  return `${operations(time.model_flops / (time.mfu * time.step_s * ranks))}/s`;
}

/** Format the interval of the step time: "0.8 s to 1.2 s". */
export function within(time) {
  return between(duration, time.step_s, time.interval.share);
}

/** Describe the source and the margin of error of an estimate. */
function basis(time, cluster) {
  const { words, basis: basisName } = time.interval;
  if (basisName === "runs") return `Estimated for ${cluster.name}: ${words}. The step time range covers nine of ten runs on a host with the same load.`;
  const why = time.basis === "calibrated" ? "A few runs on the host narrow the step time range." : "Calibrate a host, or run jobs on the host, to improve the estimate.";
  return `Estimated for ${cluster.name}: ${words}. ${why}`;
}

function figure(name, value, title, explained) {
  const button = explained ? el("button", { className: "button quiet small", type: "button" }, "Explain") : null;
  if (button) button.dataset.explain = explained;
  return el("div", { title }, el("dt", {}, `${name} `, button), el("dd", {}, value));
}
