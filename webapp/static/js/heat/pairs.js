// The traffic matrix: measured next to predicted, with one color scale.
import { busFactor } from "../collectives.js";
import { el } from "../dom.js";
import { counted, decimalBytes, exactBytes, integer } from "../format.js";
import { heatMap, legend } from "./map.js";
import { measured, ofStep, predicted, strides } from "./spread.js";

export const MOST_RANKS = 1024; // a million cells

const AXES = { rows: { title: "Sending rank", words: integer }, columns: { title: "Receiving rank", words: integer } };

/** Return the first ranks of all hosts except the first host. */
export const hostBorders = (members) => (members ?? []).map((member) => member.first_rank).filter((rank) => rank > 0);

/** Return show(job, state, step). `step` is the latest traced step, or null. */
export function pairsPanel(panel) {
  const $ = (id) => panel.querySelector(`#${id}`);
  const output = $("pairs-status");
  /** @type {Record<string, {ranks: number, bytes: Float64Array} | null>} */
  const squares = { measured: null, predicted: null };
  const words = (from, to) => {
    const parts = ["measured", "predicted"].map((name) => squares[name] && `${exactBytes(Math.round(squares[name].bytes[from * squares[name].ranks + to]))} ${name}`);
    return `rank ${from} to rank ${to}, per step: ${parts.filter(Boolean).join(", ")}`;
  };
  let note = "";
  const showWords = (text) => (output.textContent = text ?? note);
  const make = (id, name) => heatMap($(id), { label: `Algorithmic bytes per step from each rank to each other rank, ${name}. Arrow keys move between cells.`, describe: words, onDescribe: showWords });
  const maps = { measured: make("pairs-measured", "measured"), predicted: make("pairs-predicted", "predicted") };
  let drawn = "";
  $("pairs-axis").addEventListener("change", () => (drawn = ""));

  return (job, state, step, redrawn) => {
    const axis = $("pairs-axis").value;
    const accepts = (name) => !axis || name === axis;
    const steps = Math.max(0, ...[...state.ranks.values()].map((rank) => rank.exactStep || 0));
    const key = [axis, steps, step?.step, job.attempt].join();
    if (key === drawn && !redrawn) return;
    const planned = job.estimate?.stages?.length > 0;
    const layout = { ...job.spec.layout };
    const world = job.estimate?.world_size ?? Math.max(0, ...(step ? step.ranks.keys() : [])) + 1;
    if (world > MOST_RANKS) {
      panel.querySelector("[data-empty]").textContent = `The traffic matrix shows at most ${integer(MOST_RANKS)} ranks. This run has ${integer(world)} ranks.`;
      return;
    }
    squares.predicted = planned ? predicted(job.estimate, layout, accepts) : null;
    squares.measured = planned
      ? measured(state.ranks, layout, world, strides(job.estimate, layout), accepts)
      : step
        ? ofStep(step, world, accepts, busFactor)
        : null;
    if (!squares.measured && !squares.predicted) {
      const reason = step && !planned ? "The bytes of these collectives are not recorded." : job.finished ? `No step was ${planned ? "measured" : "traced"}.` : "Waiting for the first step.";
      panel.querySelector("[data-empty]").textContent = reason;
      return;
    }
    drawn = key;
    fill($("pairs-axis"), planned ? job.estimate.stages.flatMap((stage) => stage.traffic.map((row) => row.axis)) : step.groups.map((group) => group.axis));
    panel.querySelector(".heat-pair").hidden = false;
    panel.querySelector("[data-empty]").hidden = true;
    let most = 0;
    for (const one of [squares.measured, squares.predicted]) for (const value of one?.bytes ?? []) if (value > most) most = value;
    const borders = hostBorders(job.members);
    for (const [name, map] of Object.entries(maps)) {
      panel.querySelector(`#pairs-${name}`).parentElement.hidden = !squares[name];
      if (squares[name]) map.show(squares[name].bytes, { rows: world, columns: world, most, borders: { rows: borders, columns: borders }, axes: AXES, values: (bytes) => decimalBytes(Math.round(bytes)) });
    }
    const mean = steps > 0 ? `Measured values are means of ${counted(steps, "step")}.` : "No step is measured yet.";
    const source = planned ? mean : `Measured values come from the traced events of step ${integer(step.step)}.`;
    note = `Rows are sending ranks, and columns are receiving ranks. Values are algorithmic bytes per step. ${source}${borders.length > 0 ? " Lines mark host boundaries." : ""}`;
    if (!Object.values(maps).some((map) => map.pointed())) showWords(null);
    legend($("pairs-legend"), most, (value) => decimalBytes(Math.round(value)), undefined, "algorithmic bytes per step");
  };
}

/** Add the missing axes to a select. */
export function fill(select, axes) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const axis of new Set(axes)) if (!known.has(axis)) select.append(el("option", { value: axis }, `axis ${axis}`));
}
