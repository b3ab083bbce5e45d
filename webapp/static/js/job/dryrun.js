// The job page of a dry run: whether the layout fits, and one counted step of each rank.
import { coordinates } from "../collectives.js";
import { el } from "../dom.js";
import { bytes, decimalBytes, duration, exactBytes, integer, operations, relativeDifference } from "../format.js";
import { refill } from "../refill.js";
import { dryLines } from "./memory.js";
import { showLines } from "./planned.js";

const number = (text, title = "") => el("td", { className: "number", title }, text);
const getPeak = (item) => item.peak_bytes + item.optimizer_bytes;

/** Show whether the layout fits, the progress, and a line per rank. `runs`: rank -> item. `verdicts`: rank -> rows. */
export function showDryRuns(body, job, runs, verdicts) {
  const ranks = job.spec.dry_ranks;
  const current = job.finished ? null : ranks.find((rank) => !runs.has(rank));
  const lines = ranks.map((rank) => (runs.has(rank) ? row(runs.get(rank), verdicts.get(rank) ?? []) : missing(rank, job, rank === current)));
  refill(body, ...lines);
  const panel = body.closest("section");
  const fit = panel.querySelector("#dry-fit");
  const { text, tone } = fitWords(job, runs);
  if (fit.textContent !== text) fit.textContent = text;
  fit.dataset.tone = tone || "info";
  const bar = panel.querySelector("#dry-progress");
  [bar.value, bar.hidden] = [runs.size, job.finished];
}

/**
 * Describe whether the layout fits: {text, tone}. The memory of a counted rank is its tensors and the planned allowance. A
 * stage without a counted rank has its planned memory.
 */
export function fitWords({ spec, estimate, finished, status }, runs) {
  const counted = spec.dry_ranks.filter((rank) => runs.has(rank));
  if (counted.length === 0) {
    if (finished) return { text: "The dry run ended before it finished a rank.", tone: "warn" };
    return { text: status === "running" ? `Counting rank ${spec.dry_ranks[0]}.` : "Waiting for the first rank.", tone: "" };
  }
  const { stages, axes, cluster } = estimate;
  const getStage = (rank) => (stages.length === 1 ? stages[0] : (stages.find((one) => one.stage === coordinates(rank, axes).pp) ?? stages[0]));
  const needs = counted.map((rank) => {
    const stage = getStage(rank);
    const overhead = stage.memory.allowance ?? 0;
    return { stage, overhead, where: `rank ${rank}`, size: getPeak(runs.get(rank)) + overhead };
  });
  const known = new Set(needs.map(({ stage }) => stage));
  const planned = stages.filter((stage) => !known.has(stage)).map((stage) => ({ where: `stage ${stage.stage} (planned, not counted)`, size: stage.memory_bytes }));
  const most = [...needs, ...planned].reduce((best, one) => (one.size > best.size ? one : best));
  const fits = most.size <= cluster.memory_bytes;
  const text = `${fits ? "Fits" : "Does not fit"}: ${bytes(most.size)} of ${bytes(cluster.memory_bytes)} on the rank with the most memory, ${most.where}.`;
  const overhead = most.overhead > 0 ? ` This memory includes ${bytes(most.overhead)} of planned overhead.` : "";
  const progress = finished || counted.length === spec.dry_ranks.length ? "" : ` Counted ${integer(counted.length)} of ${integer(spec.dry_ranks.length)} ranks.`;
  return { text: `${text}${overhead}${progress}`, tone: fits ? "good" : "bad" };
}

/** Show the memory of each counted rank by part, next to the plan. */
export function showDryMemory(panel, body, job, runs) {
  panel.hidden = runs.size === 0;
  const counted = job.spec.dry_ranks.filter((rank) => runs.has(rank));
  showLines(body, counted.flatMap((rank) => dryLines(job.estimate, runs.get(rank))));
}

function missing(rank, { finished, status }, isCurrent) {
  const words = finished ? "No result." : isCurrent && status === "running" ? "Counting…" : "Waiting.";
  return el("tr", {}, el("th", { scope: "row" }, `rank ${rank}`), el("td", { colSpan: 7, className: "note" }, words));
}

function row(item, collectives) {
  const payload = collectives.reduce((sum, line) => sum + line.measured_bytes, 0);
  const peak = getPeak(item);
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, `rank ${item.rank}`),
    number(integer(item.parameters)),
    number(decimalBytes(payload), exactBytes(payload)),
    number(bytes(peak), exactBytes(peak)),
    number(bytes(item.predicted_bytes), exactBytes(item.predicted_bytes)),
    number(relativeDifference(item.predicted_bytes, peak)),
    number(operations(item.flops), integer(item.flops)),
    number(duration(item.seconds)),
  );
}
