// Plan and measurement side by side: bytes, time, memory, each with its error.
import { el, swatch } from "../dom.js";
import { duration, exactBytes, relativeError } from "../format.js";
import { refill } from "../refill.js";
import { memoryLines } from "./memory.js";
import { partRows, tokenOf } from "./parts.js";

const WORDS = { exposed: (axis) => `${axis}, not hidden`, hidden: (axis) => `${axis}, hidden` };

/**
 * Lines of the table: {group, name, token, planned, measured, off, unmeasured}; texts, null where nothing is known.
 * `run`: {device, measured, apart, least}: the summary's own time of a step ({steps, step_s}, null before the end), a
 * step's parts ({planned, measured}), and the bytes of tensors below which a CPU's resident set says nothing of them.
 */
export function plannedLines(estimate, state, rows, run) {
  return [...byteLines(rows, state), ...timeLines(estimate, state, run), ...memoryLines(estimate, state, run)];
}

/** Each rank by its own steps: those of a run that was cut off have not made as many. */
function byteLines(rows, state) {
  return rows.map((row) => {
    const ofStep = (figure) => Math.round(row.ranks.reduce((all, own) => all + own[figure] / state.ranks.get(own.rank).exactStep, 0));
    const [planned, measured] = [ofStep("predicted"), ofStep("measured")];
    return {
      group: "payload bytes a step, all ranks",
      name: row.axis,
      token: `--axis-${row.axis}`,
      planned: exactBytes(planned),
      measured: exactBytes(measured),
      off: relativeError(planned, measured),
    };
  });
}

function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length / 2;
  return (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
}

function timeLines(estimate, state, { measured, apart }) {
  const { time } = estimate;
  if (!time) return []; // jobs planned before there was a time
  const rate = state.progress?.rate;
  const step = measured?.step_s ?? median(state.stepTimes) ?? (rate ? estimate.tokens_per_step / rate : null);
  const group = "time of a step";
  const lines = [
    {
      group,
      name: "together",
      planned: duration(time.step_s),
      measured: step === null ? null : duration(step),
      off: step === null ? null : relativeError(time.step_s, step),
    },
  ];
  const little = apart.measured?.parts.length > 0 ? "under 0.1 % of it" : null;
  for (const part of partRows(apart.planned, apart.measured)) {
    lines.push({
      group,
      name: WORDS[part.kind]?.(part.name) ?? part.name,
      token: tokenOf(part),
      planned: part.planned === null ? null : duration(part.planned),
      measured: part.measured === null ? little : duration(part.measured),
      off: part.planned === null || part.measured === null ? null : relativeError(part.planned, part.measured),
    });
  }
  return lines;
}

/** Fills the table's body. */
export function showPlanned(body, estimate, state, rows, run) {
  showLines(body, plannedLines(estimate, state, rows, run));
}

export function showLines(body, all) {
  const lines = [];
  let group = "";
  for (const line of all) {
    if (line.group !== group) {
      group = line.group;
      lines.push(el("tr", { className: "group" }, el("th", { scope: "rowgroup", colSpan: 4 }, group)));
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
