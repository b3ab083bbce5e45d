// Memory of a rank, plan and measurement side by side: what could be counted part by part, the rest as one.
import { coordinates } from "../collectives.js";
import { bytes, relativeError } from "../format.js";
import { memoryNames } from "../pictures/memory.js";

const COUNTED = ["parameters", "optimizer", "copies"];
const NAMES = { optimizer: "optimizer: moments and fp32 weights held apart", copies: "copies of checkpoints" };
const SMALL = "too small"; // to compare: libraries' own buffers outweigh it, as the note says
const REST = "activations, working tensors, buffers";

const fuller = (sizeOf) => (best, one) => (sizeOf(one) > sizeOf(best) ? one : best);

/** The rank that held most, null before the end; and the plan of its stage. */
function fullestOf({ stages, axes }, { peaks }) {
  const planned = stages.reduce(fuller((stage) => stage.memory_bytes));
  if (peaks.size === 0) return { planned, stage: planned, rank: null, peak: null };
  const [rank, peak] = [...peaks].reduce(fuller(([, size]) => size));
  const stage = stages.length === 1 ? planned : (stages.find((one) => one.stage === coordinates(rank, axes).pp) ?? planned);
  return { planned, stage, rank, peak };
}

/** The stage that the plan has fullest, where another rank held more: {name, size, held}, `held` the most of its ranks. */
function fullestPlanned({ stages, axes }, { peaks }, reserved) {
  const { stage, memory_bytes: size } = stages.reduce(fuller((one) => one.memory_bytes));
  const held = [...peaks].filter(([rank]) => coordinates(rank, axes).pp === stage).map(([, peak]) => peak);
  return { name: `stage ${stage}, which the plan has fullest`, size: size - reserved, held: held.length > 0 ? Math.max(...held) : null };
}

/** Lines of the table, see planned.js. What the device keeps for itself is in the plan's allowance, and in no measurement. */
export function memoryLines(estimate, state, { device, least }) {
  const { planned, stage, rank, peak } = fullestOf(estimate, state);
  const reserved = Math.min(estimate.cluster?.reserved_bytes ?? 0, stage.memory.allowance ?? 0);
  const own = reserved > 0 ? `, without the process' own ${bytes(reserved)}` : "";
  const where = estimate.stages.length > 1 && rank !== null ? `, rank ${rank} of stage ${stage.stage}` : "";
  const group = `memory of the fullest rank${where}: tensors and the allocator's share${own}`;
  const small = device === "cpu" && stage.memory_bytes - (stage.memory.allowance ?? 0) < least;
  const elsewhere = stage === planned ? [] : [fullestPlanned(estimate, state, reserved)];
  const measured = { peak, parts: state.memory.get(rank), small, rest: `${REST} and the allocator's share` };
  return rankLines(group, stage, reserved, measured, elsewhere);
}

/** The same of a rank that was walked dry: tensors, and of the plan no allowance. `item`: contracts.telemetry.results.DryRunItem. */
export function dryLines({ stages, axes }, item) {
  const index = stages.length === 1 ? 0 : coordinates(item.rank, axes).pp;
  const stage = stages.find((one) => one.stage === index) ?? stages[0];
  const group = `rank ${item.rank}${stages.length > 1 ? `, stage ${stage.stage}` : ""}`;
  const walked = { peak: item.peak_bytes + item.optimizer_bytes, parts: item.memory, small: false, rest: REST };
  return rankLines(group, stage, stage.memory.allowance ?? 0, walked, []);
}

/** `without`: of the plan's allowance, what no measurement has. `others`: [{name, size, held}], beside it. */
function rankLines(group, stage, without, { peak, parts, small, rest: restName }, others) {
  const of = (name) => (stage.memory[name] ?? 0) - (name === "allowance" ? without : 0);
  const line = (name, size, measured, words = null) => ({
    group,
    name,
    planned: size === null ? null : bytes(size),
    measured: measured === null ? null : bytes(measured),
    off: measured === null || size === null ? null : (words ?? relativeError(size, measured)),
  });
  const noisy = (name, size, measured) => line(name, size, measured, small ? SMALL : null);
  const together = noisy("together", stage.memory_bytes - without, peak);
  const elsewhere = others.map(({ name, size, held }) => noisy(name, size, held));
  const names = memoryNames([stage.memory]).filter((name) => of(name) > 0);
  if (!parts) return [together, ...elsewhere, ...names.map((name) => line(name, of(name), null))];
  const counted = COUNTED.filter((name) => of(name) > 0 || parts[name] > 0).map((name) => line(NAMES[name] ?? name, of(name), parts[name]));
  // What the plan has more at that moment may be on its way to be added, and is then counted by nobody.
  const apart = parts.gradients_then !== null && of("gradients") <= parts.gradients_then;
  const rest = names.filter((name) => !COUNTED.includes(name) && !(apart && name === "gradients"));
  const sum = rest.reduce((all, name) => all + of(name), 0);
  const beside = parts.beside === null || apart ? parts.beside : parts.beside + (parts.gradients_then ?? 0);
  return [
    together,
    ...elsewhere,
    ...counted,
    ...gradientLines(stage, parts, apart, line),
    { ...noisy(apart ? restName : `gradients then there, ${restName}`, sum, beside), unmeasured: "cannot be told" },
    ...rest.map((name) => ({ ...line(`of these ${name}`, of(name), null), unmeasured: "in their sum" })),
  ];
}

/** Complete, and at the fullest moment where that is another figure. */
function gradientLines(stage, { gradients, gradients_then: then }, apart, line) {
  const [complete, planned] = [stage.gradients_bytes ?? null, stage.memory.gradients ?? 0];
  const whole = (name) => line(name, complete, gradients);
  if (!apart) return [whole("gradients once complete")];
  if (then === gradients && planned === complete) return [whole("gradients")];
  return [whole("gradients once complete"), line("gradients at the fullest moment", planned, then)];
}
