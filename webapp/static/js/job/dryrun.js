// The job page of a dry run: what one step of each tried rank would be.
import { el } from "../dom.js";
import { bytes, count, duration, exactBytes, integer } from "../format.js";

const number = (text, title = "") => el("td", { className: "number", title }, text);

/** `runs`: rank -> item; `verdicts`: rank -> rows. */
export function showDryRuns(body, runs, verdicts) {
  if (runs.size === 0) return;
  const items = [...runs.values()].sort((a, b) => a.rank - b.rank);
  body.replaceChildren(...items.map((item) => row(item, verdicts.get(item.rank) ?? [])));
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
    number(`${count(item.flops)} FLOP`, integer(item.flops)),
    number(duration(item.seconds)),
  );
}
