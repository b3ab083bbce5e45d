// Where a step's time goes: one bar and its table, utilisation and days for a round number of tokens.
import { el, stackedBar } from "../dom.js";
import { between, count, duration, integer, operations, tokenRate } from "../format.js";
import { cell, rowHead, scrolling, th } from "./table.js";

const AXES = ["tp", "cp", "ep", "pp", "dp", "world"];
const TOKENS = 1e12;
const OWN_PEAK = /^(?!.*no data sheet).*\b(?:(?:[ABHV]|G[BH])\d00|MI300X)\b/; // GPUs that have a data sheet here

const token = (name) => (AXES.includes(name) ? `--axis-${name}` : `--part-${name}`);
const label = (name) => (AXES.includes(name) ? `${name} not hidden` : name);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function timePicture(estimate) {
  const { time, cluster } = estimate;
  const parts = time.parts.filter((part) => part.seconds > 0);
  const bar = stackedBar(
    parts.map((part) => ({ token: token(part.name), value: part.seconds, title: `${label(part.name)}: ${duration(part.seconds)}` })),
    "Seconds of a step by what they are spent on",
  );
  const rows = parts.map((part) =>
    el("tr", {}, rowHead(token(part.name), label(part.name)), cell(duration(part.seconds)), cell(percent(part.seconds / time.step_s))),
  );
  const days = TOKENS / time.tokens_per_s / 86400;
  const figures = el(
    "dl",
    { className: "figures small" },
    figure("a step", duration(time.step_s), within(time)),
    figure("MFU", percent(time.mfu), "model FLOPs over the peak of all ranks; recompute not counted", "MFU"),
    figure("HFU", percent(time.hfu), "with what is computed twice"),
    figure("speed", tokenRate(time.tokens_per_s)),
    figure(`for ${count(TOKENS)} tokens`, days >= 2 ? `${days < 100 ? days.toFixed(1) : integer(Math.round(days))} days` : duration(days * 86400)),
  );
  const said = [basis(time, cluster), ...aligned(estimate), `MFU and HFU are of ${peak(estimate)} a rank.`, ...beyond(estimate)];
  return [figures, bar, scrolling([th("part"), th("seconds", true), th("share", true)], rows), el("p", { className: "note" }, said.join(" "))];
}

/** What the head's products lose to rows that do not begin at multiples of 16 bytes. */
function aligned({ aligned_vocabulary: found, vocab_size: size }) {
  if (!found) return [];
  return [`A vocabulary of ${integer(found.vocab_size)} rows would take ${duration(found.spares_s)} less: those of ${integer(size)} are not aligned for its products.`];
}

/** Why a share can be more than all, where the peak is the device's own. */
function beyond({ time: { hfu }, cluster: { accelerator } }) {
  if (hfu <= 1 || !OWN_PEAK.test(accelerator)) return [];
  return ["Attention's scores are counted whole, as MFU has it; kernels compute the half that is not masked."];
}

/** A rank's peak, which MFU is a share of. */
function peak({ time, world_size: ranks }) {
  return `${operations(time.model_flops / (time.mfu * time.step_s * ranks))}/s`;
}

/** A step's time as the interval that its error allows: "0.8 s to 1.2 s". */
export function within(time) {
  return between(duration, time.step_s, time.interval.share);
}

/** What the figure rests on, and how far off it may be. */
function basis(time, cluster) {
  const { words, basis: said } = time.interval;
  if (said === "runs") return `${cluster.name}: ${words}. Nine of ten runs come out within that, as long as the host is as busy as it was.`;
  const why = time.basis === "calibrated" ? "a few runs will tell it more closely" : "calibrate a host, or run something on it, for figures of your own";
  return `${cluster.name}: ${words}; ${why}.`;
}

function figure(name, value, title, explained) {
  const button = explained ? el("button", { className: "button quiet small", type: "button" }, "Explain") : null;
  if (button) button.dataset.explain = explained;
  return el("div", { title }, el("dt", {}, `${name} `, button), el("dd", {}, value));
}
