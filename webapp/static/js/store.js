// State of an attempt on the page, folded from telemetry batches (contracts/telemetry/batches.py). Pure: no DOM, no clock.
import { foldGauge, foldProcess, foldStanding, foldStart } from "./fold/gauges.js";
import { foldMetric } from "./fold/metrics.js";
import { foldCheckpoint, foldEval, foldStep } from "./fold/steps.js";
import { forgetCounters } from "./fold/summary.js";
import { foldPhase, foldTraffic, markGap, memberState } from "./fold/traffic.js";
import { foldLog } from "./logs/lines.js";
import { foldPlace } from "./logs/places.js";
import { Bins } from "./rates.js";
import { withExposedTime, foldTimeline } from "./timeline/fold.js";

export { secondsLeft } from "./fold/steps.js";
export { foldSummary } from "./fold/summary.js";
export const VERSION = 1;

export function createState() {
  return {
    attempt: null,
    members: new Map(), // node -> {lastId, time, host, clock, lost, awaitsGapEnd}: each sends a stream of its own
    ranks: new Map(), // rank -> see rankState
    steps: new Map(), // step -> {time, step_s, tokens, samples, loss, grad_norm, learning_rate}, null if no rank reported the value
    stride: 1, // a long run stores only multiples of the stride
    lastLoss: null, // {step, loss, words}: words where the loss is no number, and null
    metrics: new Map(), // rank, source and name -> {name, source, rank, points}: step -> {time, value, words}
    metricsLeftOut: new Map(), // rank -> {names, rate, invalid}: numbers of values
    hiddenSeries: 0, // series that the stored history left out
    evals: new Map(), // step -> {time, loss}
    marks: new Map(), // key -> {kind, time, step, text}: checkpoint, validation, resume, fault
    faultyStep: null, // the last that was at fault
    progress: null, // {step, steps, step_s, tokens, time, rate, sample_rate, over}: null values are unknown
    verdicts: new Map(), // rank -> rows
    peaks: new Map(), // rank -> bytes held at once
    memory: new Map(), // rank -> what of it was counted, MemoryParts
    proof: null, // the last item
    stepTimes: [], // seconds of rank 0's last steps
    sampleRates: [], // [samples, seconds] of rank 0's last steps with known samples
    checkpoints: new Map(), // step -> item
    dryRuns: new Map(), // rank -> item
    logs: new Map(), // rank -> see logs/lines.js
    places: new Map(), // rank -> the last known collective
    gauges: new Map(), // rank, or -1 less a host's node -> columns
    starts: new Map(), // the same -> {stage: unix seconds}
    standing: new Map(), // rank -> item, of ranks that stand still
    processes: new Map(), // rank -> the last item
    recent: new Bins(0.5, 121, "recent"),
    whole: new Bins(0.5, 1200, "whole"),
    gaps: 0,
    lost: false, // some history of some member could not be replayed
    time: null, // newest telemetry
    fromSummary: false,
    cellsLeftOut: 0, // ranks that a summary has not all cells of
  };
}

/** Where to go on reading: a position in the stream of each member. */
export function resumeFrom(state) {
  const seen = [...state.members].filter(([, member]) => member.lastId !== null);
  return seen.length > 0 ? seen.map(([node, member]) => `${node}:${member.lastId}`).join() : "0-0";
}

const FOLD = {
  traffic: foldTraffic,
  step: withExposedTime(foldStep),
  eval: foldEval,
  metric: foldMetric,
  phase: foldPhase,
  log: (state, item, node) => foldLog(state.logs, item, node),
  verdict(state, item) {
    state.verdicts.set(item.rank, item.rows);
    if (item.peak_bytes !== undefined) state.peaks.set(item.rank, item.peak_bytes);
    if (item.memory !== undefined) state.memory.set(item.rank, item.memory);
  },
  proof(state, item) {
    state.proof = item;
  },
  dry_run: (state, item) => state.dryRuns.set(item.rank, item),
  checkpoint: foldCheckpoint,
  gauge: foldGauge,
  start: foldStart,
  standing(state, item) {
    foldStanding(state, item);
    foldPlace(state.places, item);
  },
  timeline(state, item, node) {
    foldTimeline(state, item, node);
    foldPlace(state.places, item);
  },
  process: foldProcess,
  gap: (state, item, node) => markGap(state, memberState(state, node).time, item.time, node),
};

/** One entry of a member's stream. A batch of another attempt is refused: false. */
export function foldBatch(state, id, batch, node = 0) {
  if (batch.v !== VERSION) throw new Error(`The telemetry has version ${batch.v}, but this page reads version ${VERSION}. Reload the page.`);
  if (state.attempt !== null && batch.attempt !== state.attempt) return false;
  state.attempt = batch.attempt;
  if (state.fromSummary) forgetCounters(state);
  const member = memberState(state, node);
  if (member.awaitsGapEnd) {
    markGap(state, member.time, batch.time, node);
    member.awaitsGapEnd = false;
  }
  for (const item of batch.items) {
    FOLD[item.kind]?.(state, item, node);
    const rank = state.ranks.get(item.rank);
    if (rank) rank.time = item.time;
  }
  Object.assign(member, { lastId: id, time: batch.time, host: batch.host ?? null, clock: batch.clock ?? null });
  state.time = Math.max(state.time ?? 0, batch.time);
  state.recent.advance(batch.time);
  state.whole.advance(batch.time);
  return true;
}

/** The server left out entries of a member. The next batch has the end of the gap. */
export function expectGap(state, node = 0) {
  memberState(state, node).awaitsGapEnd = true;
}
