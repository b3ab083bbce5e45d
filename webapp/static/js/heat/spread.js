// Traffic between pairs of ranks: bytes of collectives, distributed by the algorithm of each collective. Pure.
// Mirrors planner.cost.traffic (a test compares both).
import { coordinates } from "../collectives.js";
import { axisGroup } from "../job/hosts.js";

const SILENT = new Set(["recv", "barrier"]); // the sender counts a recv, and a barrier carries no data

/** Return an empty matrix of bytes, at [sender * ranks + receiver]. */
export const square = (ranks) => ({ ranks, bytes: new Float64Array(ranks * ranks) });

/** Return the ranks of a group from its size and stride. */
function group(rank, size, stride) {
  const span = size * stride;
  const first = Math.floor(rank / span) * span + (rank % stride);
  return Array.from({ length: size }, (_, i) => first + i * stride);
}

function pipe(rank, layout) {
  const { size, stride } = axisGroup(layout, "pp");
  return Array.from({ length: size }, (_, stage) => (rank % stride) + stage * stride);
}

const V_SCHEDULES = new Set(["zbv", "dualpipev"]);

/** Return the stage of each chunk of layers, in a loop or in a V (planner.facts.layout.get_chunk_indices). */
function owners({ pp = 1, virtual_stages: rounds = 1, schedule }) {
  if (V_SCHEDULES.has(schedule) && rounds === 2) return Array.from({ length: 2 * pp }, (_, chunk) => (chunk < pp ? chunk : 2 * pp - 1 - chunk));
  return Array.from({ length: pp * rounds }, (_, chunk) => chunk % pp);
}

/** Return the ranks that a stage sends hidden states or gradients to, one per message. */
function stages(rank, layout) {
  const { pp: stage } = coordinates(rank, layout);
  const ranks = pipe(rank, layout);
  const owner = owners(layout);
  const near = owner.flatMap((held, chunk) => (held === stage ? [chunk + 1, chunk - 1] : []));
  return near.filter((chunk) => chunk >= 0 && chunk < owner.length && owner[chunk] !== stage).map((chunk) => ranks[owner[chunk]]);
}

/** Add the bytes that `rank` sends in one kind of collective, {op, axis, group_size, stride, algorithmic_bytes}. */
export function spread(into, rank, row, layout) {
  if (SILENT.has(row.op) || !(row.algorithmic_bytes > 0)) return;
  const add = (to, bytes) => {
    if (to < into.ranks) into.bytes[rank * into.ranks + to] += bytes;
  };
  if (row.op === "send" && row.axis === "pp") {
    const receivers = stages(rank, layout);
    for (const to of receivers) add(to, row.algorithmic_bytes / receivers.length);
    return;
  }
  const members = row.axis === "pp" ? [pipe(rank, layout)[0], pipe(rank, layout).at(-1)] : group(rank, row.group_size, row.stride);
  if (row.op === "all_to_all") {
    const others = members.filter((member) => member !== rank);
    for (const to of others) add(to, row.algorithmic_bytes / others.length);
    return;
  }
  add(members[(members.indexOf(rank) + 1) % members.length], row.algorithmic_bytes);
}

/**
 * Return the predicted matrix of one step, for axes that `accepts(axis)` selects.
 * @param {Estimate} estimate
 * @param {Layout} layout
 * @param {(axis: string) => boolean} accepts
 */
export function predicted(estimate, layout, accepts) {
  const made = square(estimate.world_size);
  const perStage = estimate.world_size / estimate.stages.length;
  for (let rank = 0; rank < made.ranks; rank += 1) {
    const stage = estimate.stages[Math.floor(rank / perStage)];
    const own = estimate.rank_bytes?.[rank]; // present if the payload of the rank differs from the stage
    for (const row of stage.traffic) {
      if (!accepts(row.axis)) continue;
      const part = own && stage.step_bytes[row.axis] > 0 ? own[row.axis] / stage.step_bytes[row.axis] : 1;
      spread(made, rank, { ...row, algorithmic_bytes: row.algorithmic_bytes * part }, layout);
    }
  }
  return made;
}

/** Return the measured matrix per step, the mean over all steps, or null before the first step. */
export function measured(ranks, layout, world, getStride, accepts) {
  const made = square(world);
  let any = false;
  for (const [rank, state] of ranks) {
    if (!state.exactStep) continue;
    any = true;
    for (const cell of state.exactCells) {
      if (!accepts(cell.axis)) continue;
      const stride = getStride(cell);
      spread(made, rank, { ...cell, stride, algorithmic_bytes: cell.algorithmic_bytes / state.exactStep }, layout);
    }
  }
  return any ? made : null;
}

/**
 * Return a function that finds the stride of a measured cell, from the plan or from the layout.
 * @param {Estimate} estimate
 * @param {Layout} layout
 */
export function strides(estimate, layout) {
  const known = new Map();
  for (const stage of estimate?.stages ?? []) {
    for (const row of stage.traffic) {
      known.set(`${row.axis} ${row.group_size} ${row.op}`, row.stride);
      known.set(`${row.axis} ${row.group_size}`, known.get(`${row.axis} ${row.group_size}`) ?? row.stride);
    }
  }
  return (cell) =>
    known.get(`${cell.axis} ${cell.group_size} ${cell.op}`) ?? known.get(`${cell.axis} ${cell.group_size}`) ?? axisGroup(layout, cell.axis)?.stride ?? 1;
}

/**
 * Return the matrix of a traced step. Events have exact groups and peers, so no plan is needed. Calls of unknown bytes are
 * left out. The matrix is null if all bytes are unknown.
 */
export function ofStep(step, world, accepts, factor) {
  const made = square(world);
  const calls = [...step.ranks.values()].flatMap((own) => own.calls);
  if (calls.length > 0 && calls.every((call) => call.bytes === null)) return null;
  for (const [rank, own] of step.ranks) {
    for (const call of own.calls) {
      if (call.bytes === null) continue;
      const { axis, ranks } = step.groups[call.group];
      if (SILENT.has(call.op) || !accepts(axis) || rank >= world) continue;
      const sent = factor(call.op, call.peer >= 0 ? 2 : ranks.length) * call.bytes;
      const others = ranks.filter((member) => member !== rank);
      const to = call.peer >= 0 ? [call.peer] : call.op === "all_to_all" ? others : [ranks[(ranks.indexOf(rank) + 1) % ranks.length]];
      for (const other of to) if (other < world && other !== rank) made.bytes[rank * world + other] += sent / to.length;
    }
  }
  return made;
}
