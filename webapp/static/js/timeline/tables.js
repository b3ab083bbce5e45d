// Tables below a timeline: percentiles, bus bandwidth, exposed and overlapped time, bubble.
import { el, swatch } from "../dom.js";
import { byteRate, duration, integer, opName } from "../format.js";
import { axisToken } from "./colors.js";
import { bubble, collectiveTimes, groupBandwidths, overlap } from "./stats.js";

const MOST_OF_AXIS = 6;
const number = (text, title) => el("td", { className: "number", title }, text);
const head = (axis) => el("th", { scope: "row" }, swatch(axisToken(axis)), axis);
const percent = (share) => (share === null || !Number.isFinite(share) ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`);

/** Format ranks in few characters: "0–7", "0, 4, 8". */
export function rankWords(ranks) {
  const step = ranks[1] - ranks[0];
  const even = ranks.length > 2 && ranks.every((rank, i) => i === 0 || rank - ranks[i - 1] === step);
  if (even) return step === 1 ? `${ranks[0]}–${ranks.at(-1)}` : `${ranks[0]}, ${ranks[1]}, … ${ranks.at(-1)}`;
  return ranks.length > 8 ? `${ranks.slice(0, 7).join(", ")}, … ${ranks.at(-1)}` : ranks.join(", ");
}

/** Return the link of a group, which is the network if the group spans hosts. Null if unknown. */
export function findLink(ranks, links, members) {
  if (!links) return null;
  const findHost = (rank) =>
    members?.length > 0 ? members.findIndex((one) => rank >= one.first_rank && rank < one.first_rank + one.num_ranks) : Math.floor(rank / links.per_node);
  const crosses = new Set(ranks.map(findHost)).size > 1;
  const calibrated = links.basis === "calibrated";
  if (crosses) return { speed: links.network_bytes_per_s, measured: calibrated, words: `between hosts, ${links.basis} of ${links.name}` };
  const basis = links.link_runs ? `from ${links.link_runs} run${links.link_runs === 1 ? "" : "s"} of` : `${links.basis} of`;
  return { speed: links.node_bytes_per_s, measured: calibrated || links.link_runs > 0, words: `inside a host, ${basis} ${links.name}` };
}

export function showCollectiveTimes(body, step) {
  body.replaceChildren(
    ...collectiveTimes(step).map((row) =>
      el(
        "tr",
        {},
        head(row.axis),
        el("td", {}, opName(row.op)),
        number(integer(row.size)),
        number(integer(row.calls)),
        ...[row.p50, row.p90, row.p99].map((seconds) => number(duration(seconds))),
        el("td", {}, `rank ${row.slowest}, ${duration(row.slowestTook)}`),
        number(duration(row.wait50)),
        el("td", {}, row.lastRank === null ? "unknown" : `rank ${row.lastRank}, ${percent(row.lastShare)}`),
      ),
    ),
  );
}

function slowest(rows) {
  const axes = [...new Set(rows.map((row) => row.axis))];
  return axes.flatMap((axis) =>
    rows
      .filter((row) => row.axis === axis)
      .sort((a, b) => a.busbw - b.busbw)
      .slice(0, MOST_OF_AXIS),
  );
}

/** Return the cell with the share of the link. A measured bandwidth above the link bandwidth has no share. */
export function ofLink(busbw, link) {
  if (!link) return number("–");
  if (busbw <= link.speed) return number(percent(busbw / link.speed));
  return number("above 100%", `The measured bandwidth is above the known bandwidth of the link: ${byteRate(link.speed)} (${link.words})`);
}

/** "0 → 2" for a group that sends in one direction, else its ranks. */
const wayWords = ({ ways, ranks }) => (ways.size === 1 && !ways.has("") ? [...ways][0] : rankWords(ranks));

export function showGroups(body, step, links, members) {
  const rows = groupBandwidths(step);
  if (rows.length === 0) {
    body.replaceChildren(el("tr", {}, el("td", { className: "note", colSpan: 8 }, "Unknown: no collective of this step has bytes and a transfer time.")));
    return;
  }
  const shown = slowest(rows);
  body.replaceChildren(
    ...shown.map((row) => {
      const link = findLink(row.ranks, links, members);
      return el(
        "tr",
        {},
        head(row.axis),
        el("td", {}, wayWords(row)),
        el("td", {}, [...row.ops].map(opName).join(", ")),
        number(integer(row.calls)),
        number(byteRate(row.busbw)),
        number(byteRate(row.best)),
        number(link ? `${byteRate(link.speed)}${link.measured ? "" : ", not measured"}` : "unknown", link?.words),
        ofLink(row.busbw, link),
      );
    }),
  );
  if (rows.length > shown.length) {
    body.append(el("tr", {}, el("td", { className: "note", colSpan: 8 }, `The table shows the slowest ${MOST_OF_AXIS} groups of each axis. ${rows.length - shown.length === 1 ? "1 faster group is" : `${integer(rows.length - shown.length)} faster groups are`} not shown.`)));
  }
}

/** Show exposed and overlapped time. `planned` is the time of the estimate, or null. */
export function showOverlap(body, step, planned) {
  const known = new Map((planned?.parts ?? []).map((part) => [part.name, part.seconds]));
  body.replaceChildren(
    ...overlap(step).map((row) => {
      if (row.exposed === null) return el("tr", {}, head(row.axis), ...["unknown", "unknown", "unknown", "–"].map((text) => number(text)));
      const all = row.exposed + row.hidden;
      return el(
        "tr",
        {},
        head(row.axis),
        number(duration(row.exposed)),
        number(duration(row.hidden)),
        number(all > 0 ? percent(row.hidden / all) : "–"),
        number(known.has(row.axis) ? duration(known.get(row.axis)) : "–"),
      );
    }),
  );
}

/** Describe the measured bubble, the planned bubble and the ideal bubble of the schedule. */
export function bubbleWords(step, job) {
  const found = bubble(step);
  if (!found) return "";
  const words = [`Pipeline idle time: ${percent(found.share)} of ${duration(found.seconds)} (mean over ranks; least idle rank ${percent(found.least)}).`];
  const time = job?.estimate?.time;
  const planned = time?.parts.find((part) => part.name === "bubble");
  if (planned && time.step_s > 0) words.push(`Planned bubble: ${percent(planned.seconds / time.step_s)}.`);
  const { pp, virtual_stages: rounds = 1, schedule } = job?.spec?.layout ?? {};
  const micro = job?.estimate?.micro_batches;
  if (pp > 1 && micro > 0 && FILLS.has(schedule)) {
    const ideal = (pp - 1) / (micro * rounds + pp - 1);
    words.push(`The ideal bubble of a pipeline with equal stages is ${percent(ideal)}.`);
  }
  return words.join(" ");
}

const FILLS = new Set(["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]);
