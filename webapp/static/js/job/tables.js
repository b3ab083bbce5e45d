// The job page's tables: collectives, predicted against measured, and the ranks' own verdicts.
import { busFactor, collectiveRows, compareAxes, sum } from "../collectives.js";
import { el, swatch } from "../dom.js";
import { byteRate, bytes, counted, difference, exactBytes, integer, milliseconds, opName, ratio } from "../format.js";
import { refill } from "../refill.js";

const number = (text, extra = "") => el("td", { className: `number ${extra}`.trim() }, text);
const emptyRow = (columns, text) => el("tr", {}, el("td", { colSpan: columns, className: "note" }, text));

function axisCell(axis) {
  return el("th", { scope: "row" }, swatch(`--axis-${axis}`), axis);
}

/** Of a summary that had no room for all that its ranks counted. */
export const leftOut = (state) => `It holds not all that ${counted(state.cellsLeftOut, "rank")} counted`;

/** op, axis, group size, calls, payload bytes, mean time, algorithmic and bus bandwidth. */
export function showCollectives(body, state, phases, finished) {
  const rows = collectiveRows([...state.ranks.values()].map((rank) => [...rank.cells.values()]), phases);
  if (rows.length === 0) {
    refill(body, emptyRow(8, `No collective ${finished ? "was seen" : "seen so far"}${phases ? " in this phase" : ""}.`));
    return;
  }
  refill(
    body,
    ...rows.map((row) =>
      el(
        "tr",
        {},
        axisCell(row.axis),
        el("td", {}, opName(row.op)),
        number(integer(row.group_size)),
        number(integer(row.count)),
        el("td", { className: "number", title: exactBytes(row.payload_bytes) }, bytes(row.payload_bytes)),
        number(milliseconds(row.mean_s)),
        number(byteRate(row.algbw)),
        el("td", { className: "number", title: `× ${busFactor(row.op, row.group_size).toFixed(3)}` }, row.busbw > 0 ? byteRate(row.busbw) : "–"),
      ),
    ),
    ...(state.cellsLeftOut > 0 ? [emptyRow(8, `The stored summary is all that is left. ${leftOut(state)}: calls and bytes are those of the others.`)] : []),
  );
}

function comparisonCells({ predicted, measured, predictedCalls, measuredCalls }) {
  const off = measured - predicted;
  return [
    number(exactBytes(predicted)),
    number(exactBytes(measured)),
    number(difference(off), off === 0 ? "zero" : "off"),
    number(ratio(measured, predicted)),
    number(integer(predictedCalls)),
    number(integer(measuredCalls), measuredCalls === predictedCalls ? "" : "off"),
  ];
}

/** By axis, summed over ranks; `open` is the set of axes whose ranks are shown. Returns the rows, and all that is off: differences do not cancel. */
export function showComparison(body, note, state, predictedOf, open, finished) {
  const rows = compareAxes(state.ranks, predictedOf);
  if (rows.length === 0) {
    const text = [...state.ranks.values()].some((rank) => rank.exactStep)
      ? "This layout needs no communication in a step: 0 B predicted, 0 B measured."
      : finished
        ? "The run ended before a step was counted."
        : "Waiting for the first step that is counted.";
    refill(body, emptyRow(7, text));
    return { rows, off: null };
  }
  const lines = [];
  for (const row of rows) {
    const expanded = open.has(row.axis);
    const label = `${expanded ? "Hide" : "Show"} the ranks of axis ${row.axis}`;
    const toggle = el("button", { type: "button", className: "button quiet small", ariaLabel: label }, expanded ? "−" : "+");
    toggle.setAttribute("aria-expanded", String(expanded));
    toggle.dataset.axis = row.axis;
    const head = axisCell(row.axis);
    head.append(" ", toggle);
    const line = el("tr", {}, head, ...comparisonCells(row));
    line.dataset.axis = row.axis;
    line.dataset.key = row.axis;
    lines.push(line);
    if (!expanded) continue;
    for (const own of row.ranks) {
      const name = el("th", { scope: "row" }, `rank ${own.rank}`);
      const line = el("tr", { className: "rank-row" }, name, ...comparisonCells(own));
      line.dataset.key = `${row.axis} ${own.rank}`;
      lines.push(line);
    }
  }
  const all = sum(rows);
  if (rows.length > 1) {
    lines.push(el("tr", { className: "total" }, el("th", { scope: "row" }, "all axes"), ...comparisonCells(all)));
  }
  refill(body, ...lines);
  note.textContent = stepsWords(state);
  return { rows, off: allOff(rows) };
}

/** Bytes and calls by which ranks are off on any axis, without sign; `net` is what is left of the bytes by axis. */
function allOff(rows) {
  const off = { bytesOff: 0, callsOff: 0, net: 0 };
  for (const row of rows) {
    off.net += Math.abs(row.measured - row.predicted);
    for (const own of row.ranks) {
      off.bytesOff += Math.abs(own.measured - own.predicted);
      off.callsOff += Math.abs(own.measuredCalls - own.predictedCalls);
    }
  }
  return off;
}

/** "exact" only where nothing at all is off on any rank; `exact` is false where a router decides what each rank sends.
 * `missing`: " on 5 of 8 ranks" until all have counted. */
export function showBadge(badge, off, exact, missing = "") {
  const words = (bytesOff, callsOff) => `${exactBytes(bytesOff)}, ${integer(callsOff)} ${callsOff === 1 ? "call" : "calls"} off`;
  if (off === null) [badge.textContent, badge.dataset.tone] = ["not checked", "warn"];
  else if (off.net > 0 || off.callsOff > 0) [badge.textContent, badge.dataset.tone] = [words(off.bytesOff, off.callsOff), "bad"];
  else if (!exact) [badge.textContent, badge.dataset.tone] = ["exact over all ranks, an estimate for each", "warn"];
  else if (off.bytesOff > 0) [badge.textContent, badge.dataset.tone] = [words(off.bytesOff, off.callsOff), "bad"];
  else if (missing) [badge.textContent, badge.dataset.tone] = [`${words(0, 0)}${missing}`, "warn"];
  else [badge.textContent, badge.dataset.tone] = ["exact: 0 B, 0 calls off", "good"];
}

function stepsWords(state) {
  const steps = [...state.ranks.values()].map((rank) => rank.exactStep).filter(Boolean);
  const [fewest, most] = [Math.min(...steps), Math.max(...steps)];
  const range = fewest === most ? integer(most) : `${integer(fewest)} to ${integer(most)}`;
  return `${range} ${most === 1 ? "step" : "steps"} on ${steps.length === 1 ? "its one rank" : `each of ${integer(steps.length)} ranks`}; payload bytes of the optimiser steps, summed over ranks.`;
}

/** Every phase, every collective, as each rank compared them itself at its end; ranks that are off come first. */
export function showVerdicts(body, summary, state, telling) {
  const ranks = [...state.verdicts.entries()].sort((a, b) => a[0] - b[0]);
  const [lines, linesOff] = [[], []];
  for (const [rank, rows] of ranks) {
    let [predicted, measured, countsOff] = [0, 0, 0];
    for (const row of rows) {
      predicted += row.predicted_bytes;
      measured += row.measured_bytes;
      countsOff += Math.abs(row.measured_count - row.predicted_count);
    }
    const rowsOff = rows.filter((r) => r.measured_bytes !== r.predicted_bytes || r.measured_count !== r.predicted_count);
    const detail = rowsOff.map((r) => `${r.phase} ${opName(r.op)} over ${r.axis}`).join("; ") || "every phase agrees";
    (rowsOff.length > 0 ? linesOff : lines).push(
      el(
        "tr",
        {},
        el("th", { scope: "row" }, `rank ${rank}`),
        number(exactBytes(predicted)),
        number(exactBytes(measured)),
        number(difference(measured - predicted), rowsOff.length === 0 ? "zero" : "off"),
        number(integer(countsOff), countsOff === 0 ? "zero" : "off"),
        el("td", {}, detail),
      ),
    );
  }
  const wrong = linesOff.length;
  body.replaceChildren(...linesOff, ...lines);
  const all = ranks.length === 1 ? "Its one rank" : `All ${integer(ranks.length)} ranks`;
  const some = ranks.length < telling;
  summary.textContent =
    wrong === 0
      ? `${some ? `The ${integer(ranks.length)} of ${integer(telling)} ranks that told` : all}: predicted and measured agree to the byte and to the call.`
      : `${integer(wrong)} of ${counted(ranks.length, "rank")} measured something other than predicted.`;
  summary.dataset.tone = wrong > 0 ? "bad" : some ? "" : "good";
}
