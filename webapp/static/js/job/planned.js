// Memory, step time and traffic per step: planned, measured, and the difference.
import { el, swatch } from "../dom.js";
import { duration, exactBytes, relativeDifference } from "../format.js";
import { refill } from "../refill.js";
import { memoryLines } from "./memory.js";
import { partRows, getToken } from "./parts.js";
import { getStepTime } from "./steptime.js";

const WORDS = { exposed: (axis) => `${axis}, exposed`, hidden: (axis) => `${axis}, overlapped` };

/**
 * Return the lines of the table: {group, name, token, planned, measured, off, unmeasured, kind}, texts or null.
 * `kind` is the kind of the planned values: exact or estimate. `run` is {device, measured, apart, least, isExact}. `measured` is the step time of the summary ({steps, step_s}, null before the
 * end). `apart` has the parts of a step ({planned, measured}). `least` is the size of tensors below which a CPU run has no
 * error. `isExact` is false if a router decides the traffic.
 * @param {Estimate} estimate
 */
export function plannedLines(estimate, state, rows, run) {
  return [
    ...memoryLines(estimate, state, run).map((line) => ({ ...line, kind: "estimate" })),
    ...timeLines(estimate, state, run).map((line) => ({ ...line, kind: "estimate" })),
    ...byteLines(rows, state).map((line) => ({ ...line, kind: run.isExact ? "exact" : "estimate" })),
  ];
}

/** Divide the traffic of each rank by its own number of steps, because ranks of an interrupted run differ. */
function byteLines(rows, state) {
  return rows.map((row) => {
    const ofStep = (figure) => Math.round(row.ranks.reduce((all, own) => all + own[figure] / state.ranks.get(own.rank).exactStep, 0));
    const [planned, measured] = [ofStep("predicted"), ofStep("measured")];
    return {
      group: "traffic per step (payload bytes, all ranks)",
      name: row.axis,
      token: `--axis-${row.axis}`,
      planned: exactBytes(planned),
      measured: exactBytes(measured),
      off: relativeDifference(planned, measured),
    };
  });
}

function timeLines(estimate, state, { measured, apart }) {
  const { time } = estimate;
  if (!time) return []; // jobs of old versions
  const rate = state.progress?.rate;
  const known = getStepTime({ finished: measured !== null && measured !== undefined, exit: { summary: { measured } } }, state);
  const step = known?.step_s ?? (rate ? estimate.tokens_per_step / rate : null);
  const group = "step time";
  /** @type {any[]} */
  const lines = [
    {
      group,
      name: "total",
      planned: duration(time.step_s),
      measured: step === null ? null : duration(step),
      off: step === null ? null : relativeDifference(time.step_s, step),
    },
  ];
  const little = apart.measured?.parts.length > 0 ? "under 0.1%" : null;
  for (const part of partRows(apart.planned, apart.measured)) {
    lines.push({
      group,
      name: WORDS[part.kind]?.(part.name) ?? part.name,
      token: getToken(part),
      planned: part.planned === null ? null : duration(part.planned),
      measured: part.measured === null ? little : duration(part.measured),
      off: part.planned === null || part.measured === null ? null : relativeDifference(part.planned, part.measured),
    });
  }
  return lines;
}

/** Fills the table's body. */
export function showPlanned(body, estimate, state, rows, run) {
  showLines(body, plannedLines(estimate, state, rows, run));
}

const kindBadge = (kind) => {
  const badge = el("span", { className: "badge plain" }, kind);
  badge.dataset.tone = kind === "exact" ? "good" : "warn";
  return badge;
};

export function showLines(body, all) {
  const lines = [];
  let group = "";
  for (const line of all) {
    if (line.group !== group) {
      group = line.group;
      lines.push(el("tr", { className: "group" }, el("th", { scope: "rowgroup", colSpan: 4 }, group, line.kind ? kindBadge(line.kind) : null)));
    }
    const cell = (text, missing) => el("td", { className: text === null ? "number note" : "number" }, text ?? missing);
    lines.push(
      el(
        "tr",
        {},
        el("th", { scope: "row" }, line.token ? swatch(line.token) : null, line.name),
        cell(line.planned, "–"),
        cell(line.measured, line.unmeasured ?? "not measured"),
        cell(line.off, "–"),
      ),
    );
  }
  refill(body, ...lines);
}
