// Memory of a rank, planned and measured. Some parts are counted, and "other" is the remainder.
import { coordinates } from "../collectives.js";
import { bytes, relativeDifference } from "../format.js";
import { memoryNames } from "../pictures/memory.js";

const COUNTED = ["parameters", "optimizer", "copies"];
const NAMES = {
  optimizer: "optimizer state",
  copies: "checkpoint copies",
  gathered: "gathered parameters",
  working: "temporary tensors",
  buffers: "communication buffers",
  allowance: "allocator reserve",
};
const SMALL = "not compared"; // buffers of libraries outweigh the tensors
const REST = "other (activations, temporary tensors, buffers)";
const REST_WITH_GRADIENTS = "other (activations, temporary tensors, buffers, gradients)";

const fuller = (getSize) => (best, one) => (getSize(one) > getSize(best) ? one : best);

/** Return the rank with the most memory (null before the end) and the plan of its stage. */
function findFullest({ stages, axes }, { peaks }) {
  const planned = stages.reduce(fuller((stage) => stage.memory_bytes));
  if (peaks.size === 0) return { planned, stage: planned, rank: null, peak: null };
  const [rank, peak] = [...peaks].reduce(fuller(([, size]) => size));
  const stage = stages.length === 1 ? planned : (stages.find((one) => one.stage === coordinates(rank, axes).pp) ?? planned);
  return { planned, stage, rank, peak };
}

/** Return {name, size, held} of the stage with the most planned memory. `held` is the measured maximum of its ranks. */
function fullestPlanned({ stages, axes }, { peaks }, reserved) {
  const { stage, memory_bytes: size } = stages.reduce(fuller((one) => one.memory_bytes));
  const held = [...peaks].filter(([rank]) => coordinates(rank, axes).pp === stage).map(([, peak]) => peak);
  return { name: `stage ${stage} (most planned memory)`, size: size - reserved, held: held.length > 0 ? Math.max(...held) : null };
}

/**
 * Return the lines of the table, see planned.js. Only the plan includes process overhead, so the lines exclude it.
 * @param {Estimate} estimate
 */
export function memoryLines(estimate, state, { device, least }) {
  const { planned, stage, rank, peak } = findFullest(estimate, state);
  const reserved = Math.min(estimate.cluster?.reserved_bytes ?? 0, stage.memory.allowance ?? 0);
  const own = reserved > 0 ? `, without ${bytes(reserved)} of process overhead` : "";
  const where = estimate.stages.length > 1 && rank !== null ? ` (rank ${rank}, stage ${stage.stage})` : "";
  const group = `memory of the rank with the most memory${where}${own}`;
  const small = device === "cpu" && stage.memory_bytes - (stage.memory.allowance ?? 0) < least;
  const elsewhere = stage === planned ? [] : [fullestPlanned(estimate, state, reserved)];
  const measured = { peak, parts: state.memory.get(rank), small };
  return rankLines(group, stage, reserved, measured, elsewhere);
}

/**
 * Return the lines of a dry run, without the planned allowance. `item` is a contracts.telemetry.results.DryRunItem.
 * @param {Estimate} estimate
 * @param {DryRunItem} item
 */
export function dryLines({ stages, axes }, item) {
  const index = stages.length === 1 ? 0 : coordinates(item.rank, axes).pp;
  const stage = stages.find((one) => one.stage === index) ?? stages[0];
  const group = `rank ${item.rank}${stages.length > 1 ? `, stage ${stage.stage}` : ""}`;
  const walked = { peak: item.peak_bytes + item.optimizer_bytes, parts: item.memory, small: false };
  return rankLines(group, stage, stage.memory.allowance ?? 0, walked, []);
}

/** Return the lines of a rank. `without` is the part of the allowance that no measurement has. `others` are more stages. */
function rankLines(group, stage, without, { peak, parts, small }, others) {
  const of = (name) => (stage.memory[name] ?? 0) - (name === "allowance" ? without : 0);
  /** @type {(name: string, size: number | null, measured: number | null, words?: string | null) => any} */
  const line = (name, size, measured, words = null) => ({
    group,
    name,
    planned: size === null ? null : bytes(size),
    measured: measured === null ? null : bytes(measured),
    off: measured === null || size === null ? null : (words ?? relativeDifference(size, measured)),
  });
  const noisy = (name, size, measured) => line(name, size, measured, small ? SMALL : null);
  const together = noisy("total", stage.memory_bytes - without, peak);
  const elsewhere = others.map(({ name, size, held }) => noisy(name, size, held));
  const names = memoryNames([stage.memory]).filter((name) => of(name) > 0);
  if (!parts) return [together, ...elsewhere, ...names.map((name) => line(NAMES[name] ?? name, of(name), null))];
  const counted = COUNTED.filter((name) => of(name) > 0 || parts[name] > 0).map((name) => line(NAMES[name] ?? name, of(name), parts[name]));
  // If the plan has more gradients at the peak, some may exist only as temporary tensors, so they count as "other".
  const apart = parts.gradients_then !== null && of("gradients") <= parts.gradients_then;
  const rest = names.filter((name) => !COUNTED.includes(name) && !(apart && name === "gradients"));
  const sum = rest.reduce((all, name) => all + of(name), 0);
  const beside = parts.beside === null || apart ? parts.beside : parts.beside + (parts.gradients_then ?? 0);
  return [
    together,
    ...elsewhere,
    ...counted,
    ...gradientLines(stage, parts, apart, line),
    { ...noisy(apart ? REST : REST_WITH_GRADIENTS, sum, beside), unmeasured: "unknown" },
    ...rest.map((name) => ({ ...line(`other: ${NAMES[name] ?? name}`, of(name), null), unmeasured: "part of other" })),
  ];
}

/** Return gradients after backward, and gradients at the peak if that is another value. */
function gradientLines(stage, { gradients, gradients_then: then }, apart, line) {
  const [complete, planned] = [stage.gradients_bytes ?? null, stage.memory.gradients ?? 0];
  const whole = (name) => line(name, complete, gradients);
  if (!apart) return [whole("gradients after backward")];
  if (then === gradients && planned === complete) return [whole("gradients")];
  return [whole("gradients after backward"), line("gradients at the peak", planned, then)];
}
