// Folds telemetry items into what the page shows. No DOM here: data in, data out.
export const BIN_S = 0.5;
const MAX_BINS = 14_400; // two hours
const MAX_LINES = 5_000; // per log

export const cellKey = (c) => `${c.phase}|${c.op}|${c.axis}|${c.group_size}`;

export class Store {
  constructor() {
    this.reset();
  }

  reset() {
    this.cells = new Map(); // rank -> Map(key -> cell), latest
    this.stepCells = new Map(); // rank -> {step, cells}, exact at the end of that step
    this.bins = new Map(); // rank -> Map(bin -> Map("axis|op" -> bytes))
    this.firstBin = null;
    this.lastBin = null;
    this.losses = []; // [step, loss]
    this.evals = [];
    this.logs = new Map(); // rank -> [line]
    this.phases = new Map();
    this.verdicts = new Map();
    this.dropped = new Map();
    this.gaps = [];
    this.progress = null; // last step item of rank 0
    this.speeds = [];
  }

  add(batch) {
    for (const item of batch.items) this[`add_${item.kind}`]?.(item);
  }

  add_traffic(item) {
    const known = this.cells.get(item.rank) ?? new Map();
    const isFirst = known.size === 0;
    const bin = Math.floor(item.time / BIN_S);
    for (const cell of item.cells) {
      const key = cellKey(cell);
      const before = known.get(key);
      known.set(key, cell);
      // After trimmed history the first total says nothing about when its bytes moved.
      if (!before && isFirst && this.gaps.length) continue;
      this.addToBin(item.rank, bin, `${cell.axis}|${cell.op}`, cell.payload_bytes - (before?.payload_bytes ?? 0));
    }
    this.cells.set(item.rank, known);
    this.dropped.set(item.rank, item.dropped);
  }

  addToBin(rank, bin, key, size) {
    if (!this.bins.has(rank)) this.bins.set(rank, new Map());
    const bins = this.bins.get(rank);
    if (!bins.has(bin)) bins.set(bin, new Map());
    const sums = bins.get(bin);
    sums.set(key, (sums.get(key) ?? 0) + size);
    if (bins.size > MAX_BINS) bins.delete(bins.keys().next().value);
    this.firstBin = Math.min(this.firstBin ?? bin, bin);
    this.lastBin = Math.max(this.lastBin ?? bin, bin);
  }

  add_step(item) {
    this.stepCells.set(item.rank, { step: item.step, cells: item.cells });
    if (item.rank !== 0) return;
    this.progress = item;
    if (item.loss !== null) this.losses.push([item.step, item.loss]);
    this.speeds.push(item.tokens / item.step_s);
    if (this.speeds.length > 20) this.speeds.shift();
  }

  add_eval(item) {
    this.evals.push([item.step, item.loss]);
  }

  add_phase(item) {
    this.phases.set(item.rank, item.phase);
  }

  add_verdict(item) {
    this.verdicts.set(item.rank, item.rows);
  }

  add_gap(item) {
    this.gaps.push({ time: item.time, text: `${item.items} items were dropped on the host while Redis was away` });
  }

  add_log(item) {
    if (!this.logs.has(item.rank)) this.logs.set(item.rank, []);
    const lines = this.logs.get(item.rank);
    if (item.skipped) lines.push(`… ${item.skipped} lines left out: the log grew too fast …`);
    lines.push(...item.lines);
    if (lines.length > MAX_LINES) lines.splice(0, lines.length - MAX_LINES);
  }

  /** The stored summary of an attempt whose stream is gone. */
  load(summary) {
    for (const [rank, cells] of Object.entries(summary.cells)) {
      this.cells.set(Number(rank), new Map(cells.map((c) => [cellKey(c), c])));
      this.stepCells.set(Number(rank), { step: summary.steps, cells: cells.filter((c) => c.phase === "step") });
    }
    this.losses = summary.losses.map((p) => [p.step, p.loss]);
    this.evals = summary.eval_losses.map((p) => [p.step, p.loss]);
    for (const [rank, rows] of Object.entries(summary.verdict)) this.verdicts.set(Number(rank), rows);
    if (summary.tokens_per_s) this.speeds = [summary.tokens_per_s];
  }

  tokensPerSecond() {
    if (!this.speeds.length) return null;
    return this.speeds.reduce((a, b) => a + b, 0) / this.speeds.length;
  }

  /** {x: [unix s], series: Map(rank -> [bytes/s])} over whole bins; the newest, still filling, is left out. */
  rates({ axis = "", op = "", windowS = 0, ranks }) {
    if (this.lastBin === null) return { x: [], series: new Map() };
    const end = this.lastBin - 1;
    const start = windowS ? Math.max(this.firstBin, end - windowS / BIN_S) : this.firstBin;
    const stride = Math.max(1, Math.ceil((end - start + 1) / 1200));
    const x = [];
    for (let bin = start; bin <= end; bin += stride) x.push(bin * BIN_S);
    const series = new Map();
    for (const rank of ranks) {
      const bins = this.bins.get(rank) ?? new Map();
      const ys = [];
      for (let bin = start; bin <= end; bin += stride) {
        let sum = 0;
        for (let i = 0; i < stride; i += 1) sum += matching(bins.get(bin + i), axis, op);
        ys.push(sum / (stride * BIN_S));
      }
      series.set(rank, ys);
    }
    return { x, series };
  }
}

function matching(sums, axis, op) {
  let total = 0;
  for (const [key, size] of sums ?? []) {
    const [a, o] = key.split("|");
    if ((!axis || a === axis) && (!op || o === op)) total += size;
  }
  return total;
}

/** Predicted and measured payload bytes and calls of whole steps, by axis and by rank. */
export function fidelity(estimate, stepCells) {
  const perStage = estimate.axes.dp * estimate.axes.tp;
  const rows = new Map();
  const add = (axis, rank, what, bytes, calls) => {
    if (!rows.has(axis)) rows.set(axis, { axis, ranks: new Map() });
    const ranks = rows.get(axis).ranks;
    if (!ranks.has(rank)) ranks.set(rank, { rank, predicted: 0, measured: 0, predictedCalls: 0, measuredCalls: 0 });
    ranks.get(rank)[what] += bytes;
    ranks.get(rank)[`${what}Calls`] += calls;
  };
  for (const [rank, { step, cells }] of [...stepCells].sort((a, b) => a[0] - b[0])) {
    const stage = estimate.stages[Math.floor(rank / perStage)];
    const own = estimate.rank_bytes[rank] ?? stage.step_bytes;
    for (const [axis, size] of Object.entries(own)) add(axis, rank, "predicted", size * step, 0);
    for (const row of stage.traffic) add(row.axis, rank, "predicted", 0, row.count * step);
    for (const cell of cells) add(cell.axis, rank, "measured", cell.payload_bytes, cell.count);
  }
  return [...rows.values()].sort((a, b) => a.axis.localeCompare(b.axis));
}

/** Sums of all ranks by (op, axis, group size), with mean time and bandwidths. */
export function collectives(cells, busFactors) {
  const sums = new Map();
  for (const ofRank of cells.values()) {
    for (const cell of ofRank.values()) {
      const key = `${cell.axis}|${cell.op}|${cell.group_size}`;
      const sum = sums.get(key) ?? { ...cell, count: 0, completed: 0, payload_bytes: 0, busy_s: 0 };
      for (const name of ["count", "completed", "payload_bytes", "busy_s"]) sum[name] += cell[name];
      sums.set(key, sum);
    }
  }
  return [...sums].sort((a, b) => a[0].localeCompare(b[0])).map(([, sum]) => {
    const mean = sum.completed ? sum.busy_s / sum.completed : null;
    const algbw = mean && sum.payload_bytes ? sum.payload_bytes / sum.count / mean : null;
    const factor = busFactors[sum.op]?.[sum.group_size];
    return { ...sum, mean, algbw, busbw: algbw !== null && factor !== undefined ? algbw * factor : null };
  });
}
