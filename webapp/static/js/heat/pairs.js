// The panel "Who sends to whom": measured beside predicted, by the same scale.
import { busFactor } from "../collectives.js";
import { el } from "../dom.js";
import { bytes, exactBytes, integer } from "../format.js";
import { heatMap, legend } from "./map.js";
import { measured, ofStep, predicted, strides } from "./spread.js";

export const MOST_RANKS = 1024; // a square of them is a million cells

/** Numbers of ranks before which another host begins. */
export const hostBorders = (members) => (members ?? []).map((member) => member.first_rank).filter((rank) => rank > 0);

/** Returns show(job, state, step): `step` the newest step event by event, or null. */
export function pairsPanel(panel) {
  const $ = (id) => panel.querySelector(`#${id}`);
  const told = $("pairs-told");
  let squares = { measured: null, predicted: null };
  const words = (from, to) => {
    const parts = ["measured", "predicted"].map((name) => squares[name] && `${exactBytes(Math.round(squares[name].bytes[from * squares[name].ranks + to]))} ${name}`);
    return `rank ${from} sends rank ${to} ${parts.filter(Boolean).join(", ")} a step`;
  };
  let note = "";
  const tell = (text) => (told.textContent = text ?? note);
  const make = (id, name) => heatMap($(id), { label: `Algorithmic bytes of a step from each rank to each other, ${name}. Arrow keys walk the cells.`, told: words, onTell: tell });
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
      panel.querySelector("[data-empty]").textContent = `${integer(world)} ranks are more than the ${integer(MOST_RANKS)} that are drawn pair by pair.`;
      return;
    }
    squares.predicted = planned ? predicted(job.estimate, layout, accepts) : null;
    squares.measured = planned
      ? measured(state.ranks, layout, world, strides(job.estimate, layout), accepts)
      : step
        ? ofStep(step, world, accepts, busFactor)
        : null;
    if (!squares.measured && !squares.predicted) {
      panel.querySelector("[data-empty]").textContent = job.finished ? "No step was counted." : "Waiting for the first step that is counted.";
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
      if (squares[name]) map.show(squares[name].bytes, { rows: world, columns: world, most, borders: { rows: borders, columns: borders } });
    }
    const counted = steps > 0 ? `Measured: the mean of ${integer(steps)} ${steps === 1 ? "step" : "steps"}.` : "No step was counted.";
    const sources = planned ? counted : `Of step ${step.step}, as its events tell.`;
    note = `Rows send, columns receive; algorithmic bytes of a step, spread as a ring, an all-to-all or a pipeline sends them. ${sources}${borders.length > 0 ? " Lines, where there is room for them: where a host begins." : ""}`;
    if (!Object.values(maps).some((map) => map.pointed())) tell(null);
    legend($("pairs-legend"), most, (value) => `${bytes(Math.round(value))} a step`);
  };
}

/** Adds the axes that a select lacks. */
export function fill(select, axes) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const axis of new Set(axes)) if (!known.has(axis)) select.append(el("option", { value: axis }, `axis ${axis}`));
}
