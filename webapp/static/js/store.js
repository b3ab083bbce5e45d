// Folds telemetry batches (contracts/telemetry.py) into what the page shows. Pure: no DOM, no clock.
import { Bins } from "./rates.js";
import { alsoStoodStill, foldTimeline } from "./timeline/fold.js";

export const VERSION = 1;
export const LOG_LINES = 2000; // kept per rank in the page; the host keeps the files
const LOSS_POINTS = 20_000;
const STEP_TIMES = 50;

export function createState() {
  return {
    attempt: null,
    members: new Map(), // node -> {lastId, time, host, clock, lost, awaitsGapEnd}: each sends a stream of its own
    ranks: new Map(), // rank -> see rankState
    losses: new Map(), // step -> loss
    evalLosses: new Map(),
    progress: null, // {step, steps, step_s, tokens, time, rate}
    verdicts: new Map(), // rank -> rows
    peaks: new Map(), // rank -> bytes held at once
    proof: null, // the last item
    stepTimes: [], // seconds of rank 0's last steps
    checkpoints: new Map(), // step -> item
    dryRuns: new Map(), // rank -> item
    logs: new Map(), // rank -> {first, lines, skipped, next}
    recent: new Bins(0.5, 121, "recent"),
    whole: new Bins(0.5, 1200, "whole"),
    gaps: 0,
    lost: false, // some history of some member could not be replayed
    time: null, // newest telemetry
    fromSummary: false,
  };
}

function memberState(state, node) {
  if (!state.members.has(node)) state.members.set(node, { lastId: null, time: null, host: null, clock: null, lost: false });
  return state.members.get(node);
}

/** Where to go on reading: a position in the stream of each member. */
export function resumeFrom(state) {
  const seen = [...state.members].filter(([, member]) => member.lastId !== null);
  return seen.length > 0 ? seen.map(([node, member]) => `${node}:${member.lastId}`).join() : "0-0";
}

function rankState(state, rank, node = 0) {
  if (!state.ranks.has(rank)) {
    const fresh = { node, phase: null, cells: new Map(), exactStep: 0, exactCells: [], dropped: 0 };
    state.ranks.set(rank, { ...fresh, baseline: state.members.get(node)?.lost ?? false });
  }
  return state.ranks.get(rank);
}

/** The keys of `Bins`: enough to filter by axis and by collective. */
export const binKey = (cell) => `${cell.axis}/${cell.op}`;
const cellKey = (cell) => `${cell.phase}/${cell.axis}/${cell.op}/${cell.group_size}`;

function foldCells(state, item, node) {
  const rank = rankState(state, item.rank, node);
  for (const cell of item.cells) {
    const key = cellKey(cell);
    const before = rank.cells.get(key);
    // Step items and traffic items leave the rank by two doors: an older snapshot may arrive second.
    if (before && (cell.count < before.count || cell.completed < before.completed)) continue;
    rank.cells.set(key, cell);
    // After a break the first value says what happened before it, too: no honest rate follows from it.
    const known = before && !rank.stale?.has(key);
    rank.stale?.delete(key);
    if (!known && rank.baseline) continue;
    const amount = cell.payload_bytes - (known ? before.payload_bytes : 0);
    if (amount <= 0) continue;
    state.recent.add(item.rank, binKey(cell), item.time, amount);
    state.whole.add(item.rank, binKey(cell), item.time, amount);
  }
}

/** History of a member is missing up to `to`: mark it, and take the next value of its counters as new baselines. */
export function markGap(state, from, to, node = 0) {
  state.gaps += 1;
  state.lost = true;
  memberState(state, node).lost = true;
  for (const rank of state.ranks.values()) {
    if (rank.node !== node) continue;
    rank.baseline = true;
    rank.stale = new Set(rank.cells.keys());
  }
  if (from === null || to === null || to < from) return;
  state.recent.hole(Math.max(from, to - 60), to);
  state.whole.hole(from, to);
}

function thin(points) {
  if (points.size <= LOSS_POINTS) return;
  let odd = false;
  for (const step of points.keys()) {
    if (odd) points.delete(step);
    odd = !odd;
  }
}

function foldStep(state, item, node) {
  const rank = rankState(state, item.rank, node);
  rank.exactStep = item.ran;
  rank.exactCells = item.cells;
  foldCells(state, item, node);
  if (item.loss !== null) {
    state.losses.set(item.step, item.loss);
    thin(state.losses);
  }
  if (item.rank === 0) {
    state.stepTimes.push(item.step_s);
    if (state.stepTimes.length > STEP_TIMES) state.stepTimes.shift();
  }
  const before = state.progress;
  if (before && item.step <= before.step) return;
  const rate = item.step_s > 0 ? item.tokens / item.step_s : null;
  // An average over about ten steps: a single step's time jumps too much to read.
  const smooth = before?.rate && rate ? before.rate + (rate - before.rate) / Math.min(10, item.step) : rate;
  const { step, steps, step_s, tokens, time, learning_rate, grad_norm } = item;
  state.progress = { step, steps, step_s, tokens, time, learning_rate, grad_norm, rate: smooth };
}

/** Each member has a launcher: -1 is that of node 0, -2 that of node 1. */
export const logKey = (rank, node) => (rank < 0 ? -1 - node : rank);

function foldLog(state, item, node) {
  const key = logKey(item.rank, node);
  if (!state.logs.has(key)) state.logs.set(key, { node, lines: [], next: 0, total: 0 });
  const log = state.logs.get(key);
  const skipped = Math.max(item.first - log.next, item.skipped ?? 0);
  if (skipped > 0) log.lines.push({ skipped });
  const seen = Math.max(0, log.next - item.first);
  for (const text of item.lines.slice(seen)) log.lines.push({ text });
  log.next = Math.max(log.next, item.first + item.lines.length);
  log.total = log.next;
  if (log.lines.length > LOG_LINES) log.lines.splice(0, log.lines.length - LOG_LINES);
}

const FOLD = {
  traffic(state, item, node) {
    rankState(state, item.rank, node).dropped = item.dropped;
    foldCells(state, item, node);
  },
  step: alsoStoodStill(foldStep),
  timeline: foldTimeline,
  eval: (state, item) => state.evalLosses.set(item.step, item.loss),
  phase(state, item, node) {
    const rank = rankState(state, item.rank, node);
    rank.phase = item.phase;
    if (item.cells !== undefined) {
      rank.exactStep = item.steps - 1; // its phase "step" begins when the first one has ended
      rank.exactCells = item.cells;
    }
    // Of a script, which has no step items.
    if (item.rank === 0 && item.steps !== undefined) state.progress = { step: item.steps, steps: null, rate: null };
  },
  log: foldLog,
  verdict(state, item) {
    state.verdicts.set(item.rank, item.rows);
    if (item.peak_bytes !== undefined) state.peaks.set(item.rank, item.peak_bytes);
  },
  proof(state, item) {
    state.proof = item;
  },
  dry_run: (state, item) => state.dryRuns.set(item.rank, item),
  checkpoint: (state, item) => state.checkpoints.set(item.step, item),
  gap: (state, item, node) => markGap(state, memberState(state, node).time, item.time, node),
};

/** One entry of a member's stream. A batch of another attempt is refused: false. */
export function foldBatch(state, id, batch, node = 0) {
  if (batch.v !== VERSION) throw new Error(`telemetry version ${batch.v}; this page reads ${VERSION}. Reload it.`);
  if (state.attempt !== null && batch.attempt !== state.attempt) return false;
  state.attempt = batch.attempt;
  if (state.fromSummary) forgetCounters(state);
  const member = memberState(state, node);
  if (member.awaitsGapEnd) {
    markGap(state, member.time, batch.time, node);
    member.awaitsGapEnd = false;
  }
  for (const item of batch.items) FOLD[item.kind]?.(state, item, node);
  Object.assign(member, { lastId: id, time: batch.time, host: batch.host ?? null, clock: batch.clock ?? null });
  state.time = Math.max(state.time ?? 0, batch.time);
  state.recent.advance(batch.time);
  state.whole.advance(batch.time);
  return true;
}

/** The server had to leave out entries of a member: its next batch says up to when. */
export function expectGap(state, node = 0) {
  memberState(state, node).awaitsGapEnd = true;
}

// The stream replays what the summary had condensed; losses stay, they are keyed by step.
function forgetCounters(state) {
  state.ranks.clear();
  state.verdicts.clear();
  state.fromSummary = false;
}

/** What is left of an attempt whose stream is gone (contracts.control.Summary). */
export function foldSummary(state, summary) {
  state.fromSummary = true;
  for (const point of summary.losses) state.losses.set(point.step, point.loss);
  for (const item of summary.dry_runs ?? []) state.dryRuns.set(item.rank, item);
  for (const item of summary.checkpoints ?? []) state.checkpoints.set(item.step, item);
  for (const point of summary.eval_losses) state.evalLosses.set(point.step, point.loss);
  for (const [name, cells] of Object.entries(summary.cells)) {
    const rank = rankState(state, Number(name));
    for (const cell of cells) rank.cells.set(cellKey(cell), cell);
    rank.exactStep = summary.ran_steps ?? summary.steps;
    rank.exactCells = cells.filter((cell) => cell.phase === "step");
  }
  for (const [name, peak] of Object.entries(summary.peak_bytes ?? {})) state.peaks.set(Number(name), peak);
  state.proof = summary.proof ?? null;
  for (const [name, rows] of Object.entries(summary.verdict)) state.verdicts.set(Number(name), rows);
  if (summary.steps > 0) {
    state.progress = { step: summary.steps, steps: null, step_s: null, tokens: null, rate: summary.tokens_per_s };
  }
}

/** Seconds left at the pace of the last steps, or null. */
export function secondsLeft(progress) {
  if (!progress?.rate || !progress.tokens || !progress.steps) return null;
  return ((progress.steps - progress.step) * progress.tokens) / progress.rate;
}
