// The checkpoints of a job, with links that resume them.
import { el } from "../dom.js";
import { bytes, exactBytes, integer, milliseconds } from "../format.js";
import { refill } from "../refill.js";

const number = (text, title = "") => el("td", { className: "number", title }, text);

/** Show `checkpoints` (step -> item). The host keeps the latest `keep` complete checkpoints. */
export function showCheckpoints(section, body, checkpoints, keep, jobId) {
  section.hidden = checkpoints.size === 0;
  const items = [...checkpoints.values()].sort((a, b) => b.step - a.step);
  const keptItems = new Set(items.filter((item) => item.name !== null).slice(0, keep));
  const rows = items.map((item) => row(item, keptItems.has(item), jobId));
  rows.forEach((line, at) => (line.dataset.key = items[at].step));
  refill(body, ...rows);
}

function row(item, keptItems, jobId) {
  if (item.name === null) {
    const problem = el("td", { colSpan: 5, className: "off" }, `not written: ${item.problem}`);
    return el("tr", {}, number(integer(item.step)), problem);
  }
  const query = new URLSearchParams({ from: jobId, resume: item.name });
  const goOn = el("a", { className: "button small", href: `/jobs/new/?${query}` }, "Resume…");
  return el(
    "tr",
    {},
    number(integer(item.step)),
    el("td", {}, el("code", {}, item.name)),
    number(bytes(item.num_bytes), exactBytes(item.num_bytes)),
    number(milliseconds(item.stall_s)),
    number(milliseconds(item.save_s)),
    el("td", {}, keptItems ? goOn : el("span", { className: "note" }, "deleted")),
  );
}
