// The job page of a dry run: what one step of each tried rank would be.
import { el } from "../dom.js";
import { bytes, duration, exactBytes, integer, operations, relativeError } from "../format.js";
import { refill } from "../refill.js";
import { dryLines } from "./memory.js";
import { showLines } from "./planned.js";

const number = (text, title = "") => el("td", { className: "number", title }, text);

/** A line for each rank that `job` asks for. `runs`: rank -> item; `verdicts`: rank -> rows. */
export function showDryRuns(body, job, runs, verdicts) {
  const lines = job.spec.dry_ranks.map((rank) => (runs.has(rank) ? row(runs.get(rank), verdicts.get(rank) ?? []) : none(rank, job)));
  refill(body, ...lines);
}

/** Under them what each holds, part by part, beside the plan. */
export function showDryMemory(panel, body, job, runs) {
  panel.hidden = runs.size === 0;
  const tried = job.spec.dry_ranks.filter((rank) => runs.has(rank));
  showLines(body, tried.flatMap((rank) => dryLines(job.estimate, runs.get(rank))));
}

function none(rank, { finished }) {
  return el("tr", {}, el("th", { scope: "row" }, `rank ${rank}`), el("td", { colSpan: 7, className: "note" }, finished ? "Not tried." : "Waiting."));
}

function row(item, collectives) {
  const payload = collectives.reduce((sum, line) => sum + line.measured_bytes, 0);
  const kept = item.peak_bytes + item.optimizer_bytes;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, `rank ${item.rank}`),
    number(integer(item.parameters)),
    number(bytes(payload), exactBytes(payload)),
    number(bytes(kept), exactBytes(kept)),
    number(bytes(item.predicted_bytes), exactBytes(item.predicted_bytes)),
    number(relativeError(item.predicted_bytes, kept)),
    number(operations(item.flops), integer(item.flops)),
    number(duration(item.seconds)),
  );
}
