// Tables of the job page: collectives, traffic check, traffic check by rank.
import { busFactor, collectiveRows, compareAxes, sum } from "../collectives.js";
import { el, swatch } from "../dom.js";
import { byteRate, counted, decimalBytes, difference, exactBytes, integer, milliseconds, opName, ratio } from "../format.js";
import { refill } from "../refill.js";

const number = (text, extra = "") => el("td", { className: `number ${extra}`.trim() }, text);
const emptyRow = (columns, text) => el("tr", {}, el("td", { colSpan: columns, className: "note" }, text));

function axisCell(axis) {
  return el("th", { scope: "row" }, swatch(`--axis-${axis}`), axis);
}

/** Describe a summary that was too small for all counters. */
export const leftOut = (state) => `The stored summary of the run omits some counters of ${counted(state.cellsLeftOut, "rank")}`;

/** Fill the table of collectives. */
export function showCollectives(body, state, phases, finished) {
  const rows = collectiveRows([...state.ranks.values()].map((rank) => [...rank.cells.values()]), phases);
  if (rows.length === 0) {
    refill(body, emptyRow(8, `No collectives${phases ? " in this phase" : ""}${finished ? "" : " yet"}.`));
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
        el("td", { className: "number", title: exactBytes(row.payload_bytes) }, decimalBytes(row.payload_bytes)),
        number(milliseconds(row.mean_s)),
        number(byteRate(row.algbw)),
        el("td", { className: "number", title: `algbw × ${busFactor(row.op, row.group_size).toFixed(3)}` }, row.busbw > 0 ? byteRate(row.busbw) : "–"),
      ),
    ),
    ...(state.cellsLeftOut > 0 ? [emptyRow(8, `${leftOut(state)}. Calls and bytes exclude the omitted counters.`)] : []),
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

/** Fill the traffic check. `open` has the axes whose ranks are shown. Return the rows and the total difference. */
export function showComparison(body, note, state, predict, open, finished) {
  const rows = compareAxes(state.ranks, predict);
  if (rows.length === 0) {
    const text = [...state.ranks.values()].some((rank) => rank.exactStep)
      ? "No communication in this layout: 0 B predicted, 0 B measured."
      : finished
        ? "No step was measured."
        : "Waiting for the first step.";
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

/** Sum absolute differences of bytes and calls over ranks and axes. `net` sums over ranks first, with sign. */
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

/**
 * Show the badge of the traffic check: "exact" only without any difference on any rank. `exact` is false if a router
 * decides the traffic per rank. `missing` is " on 5 of 8 ranks" until all ranks have a measured step.
 */
export function showBadge(badge, off, exact, missing = "") {
  const words = (bytesOff, callsOff) => `difference ${exactBytes(bytesOff)}, ${counted(callsOff, "call")}`;
  if (off === null) [badge.textContent, badge.dataset.tone] = ["not checked", "warn"];
  else if (off.net > 0 || off.callsOff > 0) [badge.textContent, badge.dataset.tone] = [words(off.bytesOff, off.callsOff), "bad"];
  else if (!exact) [badge.textContent, badge.dataset.tone] = ["exact in total, estimate per rank", "warn"];
  else if (off.bytesOff > 0) [badge.textContent, badge.dataset.tone] = [words(off.bytesOff, off.callsOff), "bad"];
  else if (missing) [badge.textContent, badge.dataset.tone] = [`${words(0, 0)}${missing}`, "warn"];
  else [badge.textContent, badge.dataset.tone] = ["exact: difference 0 B, 0 calls", "good"];
}

function stepsWords(state) {
  const steps = [...state.ranks.values()].map((rank) => rank.exactStep).filter(Boolean);
  const [fewest, most] = [Math.min(...steps), Math.max(...steps)];
  const range = fewest === most ? integer(most) : `${integer(fewest)} to ${integer(most)}`;
  return `${range} ${most === 1 ? "step" : "steps"} on ${steps.length === 1 ? "1 rank" : `each of ${integer(steps.length)} ranks`}. Values are payload bytes of training steps, summed over ranks.`;
}

/** Fill the traffic check by rank: all phases and collectives, ranks with differences first. */
export function showVerdicts(body, summary, state, expected) {
  const ranks = [...state.verdicts.entries()].sort((a, b) => a[0] - b[0]);
  /** @type {Element[][]} */
  const [lines, linesOff] = [[], []];
  for (const [rank, rows] of ranks) {
    let [predicted, measured, countsOff] = [0, 0, 0];
    for (const row of rows) {
      predicted += row.predicted_bytes;
      measured += row.measured_bytes;
      countsOff += Math.abs(row.measured_count - row.predicted_count);
    }
    const rowsOff = rows.filter((r) => r.measured_bytes !== r.predicted_bytes || r.measured_count !== r.predicted_count);
    const detail = rowsOff.map((r) => `${r.phase} ${opName(r.op)} over ${r.axis}`).join("; ") || "no difference";
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
  const all = ranks.length === 1 ? "1 rank" : `All ${integer(ranks.length)} ranks`;
  const some = ranks.length < expected;
  summary.textContent =
    wrong === 0
      ? `${some ? `${integer(ranks.length)} of ${integer(expected)} ranks` : all}: no difference in bytes or calls.`
      : `Traffic differs from the prediction on ${integer(wrong)} of ${counted(ranks.length, "rank")}.`;
  summary.dataset.tone = wrong > 0 ? "bad" : some ? "" : "good";
}
