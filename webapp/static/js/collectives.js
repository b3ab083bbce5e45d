// Sums over the counters of many ranks. Pure functions over cells (contracts/telemetry/items.py).

/** Bus bandwidth over algorithmic bandwidth: mirrors planner.collectives.bus_factor (a test compares them). */
export function busFactor(op, groupSize) {
  if (groupSize <= 1 || op === "barrier" || op === "recv") return 0;
  if (op === "all_reduce") return (2 * (groupSize - 1)) / groupSize;
  if (["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"].includes(op)) {
    return (groupSize - 1) / groupSize;
  }
  return 1;
}

const AXES = ["dp", "pp", "cp", "ep", "tp", "world"];

export const byAxis = (a, b) => AXES.indexOf(a) - AXES.indexOf(b);

/**
 * One row for each (op, axis, group size), summed over ranks and the requested phases.
 * mean_s, algbw and busbw are averages over completed calls; null before the first completion.
 * @param {Iterable<any[]>} cellsOfRanks
 * @param {string[] | null} phases
 */
export function collectiveRows(cellsOfRanks, phases = null) {
  const rows = new Map();
  for (const cells of cellsOfRanks) {
    for (const cell of cells) {
      if (phases && !phases.includes(cell.phase)) continue;
      const key = `${cell.axis} ${cell.op} ${cell.group_size}`;
      let row = rows.get(key);
      if (!row) {
        row = { op: cell.op, axis: cell.axis, group_size: cell.group_size };
        Object.assign(row, { count: 0, completed: 0, payload_bytes: 0, busy_s: 0 });
        rows.set(key, row);
      }
      for (const name of ["count", "completed", "payload_bytes", "busy_s"]) row[name] += cell[name];
    }
  }
  for (const row of rows.values()) {
    row.mean_s = row.completed > 0 ? row.busy_s / row.completed : null;
    const perCall = row.count > 0 ? row.payload_bytes / row.count : 0;
    row.algbw = row.mean_s > 0 ? perCall / row.mean_s : null;
    row.busbw = row.algbw === null ? null : row.algbw * busFactor(row.op, row.group_size);
  }
  return [...rows.values()].sort((a, b) => byAxis(a.axis, b.axis) || a.op.localeCompare(b.op));
}

/** An axis and its level ("" where it has one alone) as a key, and back. */
const makeKey = (axis, level) => (level ? `${axis} ${level}` : axis);
/** @type {(row: any) => string} */
const whole = () => "";

/**
 * Predicted beside measured payload bytes and calls of the steps done, by axis, with each rank's own line.
 *
 * `ranks`: rank -> {exactStep, exactCells} from its last step item; `predict(rank, getLevel)` returns the planner's
 * {axis: {bytes, calls}} of one step. `getLevel(row)` separates the levels of an axis, each with a row of its own.
 * Measured collectives nobody predicted count too: an axis appears when either side has it.
 */
export function compareAxes(ranks, predict, getLevel = whole) {
  const axes = new Map();
  const line = (key, rank) => {
    if (!axes.has(key)) axes.set(key, new Map());
    const lines = axes.get(key);
    if (!lines.has(rank)) lines.set(rank, { rank, ...NOTHING });
    return lines.get(rank);
  };
  for (const [rank, state] of ranks) {
    if (!state.exactStep) continue;
    for (const [key, step] of Object.entries(predict(rank, getLevel))) {
      line(key, rank).predicted += step.bytes * state.exactStep;
      line(key, rank).predictedCalls += step.calls * state.exactStep;
    }
    for (const cell of state.exactCells) {
      const own = line(makeKey(cell.axis, getLevel(cell)), rank);
      own.measured += cell.payload_bytes;
      own.measuredCalls += cell.count;
    }
  }
  return [...axes]
    .map(([key, lines]) => {
      const [axis, level = ""] = key.split(" ");
      return { axis, level, ...sum(lines.values()), ranks: [...lines.values()].sort((a, b) => a.rank - b.rank) };
    })
    .sort((a, b) => byAxis(a.axis, b.axis));
}

const NOTHING = { predicted: 0, measured: 0, predictedCalls: 0, measuredCalls: 0 };

/** Sums of predicted and measured bytes and calls. */
export function sum(rows) {
  const total = { ...NOTHING };
  for (const row of rows) for (const name of Object.keys(NOTHING)) total[name] += row[name];
  return total;
}

/** The planner's bytes and calls of one step by axis; ranks of a stage are alike but for those in `rank_bytes`. None of
 * a job of which nothing was predicted.
 * @param {Estimate} estimate
 */
export function makePrediction(estimate) {
  if (!estimate.stages) return () => ({});
  const perStage = estimate.axes.dp * (estimate.axes.cp ?? 1) * estimate.axes.tp; // cp: not in the oldest jobs
  return (rank, getLevel = whole) => {
    const stage = estimate.stages[Math.floor(rank / perStage)];
    const bytes = estimate.rank_bytes[rank] ?? stage.step_bytes;
    const axes = {};
    for (const row of stage.traffic) {
      const level = getLevel(row);
      const own = (axes[makeKey(row.axis, level)] ??= { bytes: level ? 0 : (bytes[row.axis] ?? 0), calls: 0 });
      if (level) own.bytes += row.payload_bytes;
      own.calls += row.count;
    }
    return axes;
  };
}

/** {pp, dp, tp} of a rank: tp innermost, pp outermost. */
export function coordinates(rank, axes) {
  const degree = { cp: 1, ...axes }; // jobs planned before there was cp have none
  const tp = rank % degree.tp;
  const outside = Math.floor(rank / degree.tp);
  const cp = outside % degree.cp;
  const rest = Math.floor(outside / degree.cp);
  return { pp: Math.floor(rest / degree.dp), dp: rest % degree.dp, cp, tp };
}
