// Statistics of a traced step: percentiles, bus bandwidth, exposed and overlapped time, bubble. Pure.
import { busFactor, byAxis } from "../collectives.js";
import { length, shared, union } from "./intervals.js";
import { transferred, waited } from "./step.js";

/** Return a percentile of sorted numbers (nearest rank). */
export function percentile(sorted, share) {
  if (sorted.length === 0) return null;
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(share * sorted.length) - 1))];
}

/** Return a row per collective and axis over all ranks of a step. `slowest` is the rank of the longest call. */
export function collectiveTimes(step) {
  const rows = new Map();
  for (const own of step.ranks.values()) {
    for (const call of own.calls) {
      if (call.open) continue;
      const { axis, ranks } = step.groups[call.group];
      const key = `${axis} ${call.op} ${ranks.length}`;
      if (!rows.has(key)) rows.set(key, { axis, op: call.op, size: ranks.length, times: [], waits: [], late: new Map(), longest: null });
      const row = rows.get(key);
      const took = call.to - call.from;
      row.times.push(took);
      if (!row.longest || took > row.longest.took) row.longest = { took, rank: call.rank };
      // The last rank never waits. In a group of two, its zeros are half of all values.
      if (call.whole !== null && call.last !== call.rank) row.waits.push(waited(call));
      if (call.last === call.rank && call.lead > 0) row.late.set(call.rank, (row.late.get(call.rank) ?? 0) + 1);
    }
  }
  return [...rows.values()].map(summed).sort((a, b) => byAxis(a.axis, b.axis) || a.op.localeCompare(b.op));
}

function summed({ axis, op, size, times, waits, late, longest }) {
  times.sort((a, b) => a - b);
  waits.sort((a, b) => a - b);
  const met = [...late.values()].reduce((sum, count) => sum + count, 0);
  const [lastRank, lastCount] = [...late].sort((a, b) => b[1] - a[1] || a[0] - b[0])[0] ?? [null, 0];
  return {
    ...{ axis, op, size, calls: times.length, p50: percentile(times, 0.5), p90: percentile(times, 0.9), p99: percentile(times, 0.99) },
    ...{ slowest: longest.rank, slowestTook: longest.took, wait50: percentile(waits, 0.5) },
    ...{ lastRank, lastShare: met > 0 ? lastCount / met : null },
  };
}

/**
 * Return the bus bandwidth of each group: bytes over transfer time, from the arrival of the last rank to the end. Calls of
 * unknown bytes or transfer time are left out.
 */
export function groupBandwidths(step) {
  const groups = new Map();
  for (const own of step.ranks.values()) {
    for (const call of own.calls) {
      const took = transferred(call);
      const group = step.groups[call.group];
      const factor = busFactor(call.op, call.op === "send" ? 2 : group.ranks.length);
      if (took === null || took <= 0 || factor === 0 || call.bytes === null) continue;
      const key = `${group.axis} ${group.nth} ${group.ranks.join()}`;
      if (!groups.has(key)) groups.set(key, { axis: group.axis, ranks: group.ranks, bytes: 0, seconds: 0, ops: new Set(), ways: new Set(), calls: 0, best: 0 });
      const row = groups.get(key);
      row.bytes += factor * call.bytes;
      row.seconds += took;
      row.calls += 1;
      row.ops.add(call.op);
      row.ways.add(call.op === "send" ? `${call.rank} → ${call.peer}` : "");
      row.best = Math.max(row.best, (factor * call.bytes) / took);
    }
  }
  for (const row of groups.values()) row.busbw = row.bytes / row.seconds;
  return [...groups.values()].sort((a, b) => byAxis(a.axis, b.axis) || a.ranks[0] - b.ranks[0]);
}

const COMPUTE = new Set(["forward", "backward", "weights"]);
const AFTER = new Set(["eval", "checkpoint"]);

/** Return the events of the step itself, without the validation and the checkpoint after the step. */
function ofStep({ calls, spans }) {
  const end = Math.min(...spans.filter((span) => AFTER.has(span.work)).map((span) => span.from));
  return { calls: calls.filter((call) => call.from < end), spans: spans.filter((span) => span.from < end) };
}
const listSpans = (own, works) => own.spans.filter((span) => works.has(span.work)).map((span) => [span.from, span.to]);
/** Return the intervals at the end of calls in which the training thread waits. */
const listBlocked = (calls) => calls.filter((call) => call.blocked > 0).map((call) => [call.to - call.blocked, call.to]);

const MAX_END_DIFFERENCE_S = 2e-3; // a backward that ends this soon after a collective waited for it

/**
 * Return the calls with the waits of DDP's reducer in C++, which the meter cannot see. The reducer issues its last bucket
 * with the last gradient, so a backward that ends with the last bucket waited since that issue. `_infer_blocked` of
 * jobs/runs/diagnosis/traced_step.py uses the same rule.
 */
function inferBlocked({ calls, spans }) {
  const inferred = new Map();
  for (const span of spans.filter((one) => one.work === "backward" || one.work === "weights")) {
    const inside = calls.filter((call) => span.from <= call.from && call.from <= span.to);
    const unblocked = inside.filter((call) => call.blocked === 0 && call.op === "all_reduce");
    if (unblocked.length === 0) continue;
    const last = inside.reduce((latest, call) => (call.from > latest.from ? call : latest));
    const lastEnd = Math.max(...unblocked.map((call) => call.to));
    const wait = span.to - lastEnd;
    if (unblocked.includes(last) && last.from < lastEnd && wait >= 0 && wait <= MAX_END_DIFFERENCE_S) inferred.set(last, { ...last, blocked: last.to - last.from });
  }
  return calls.map((call) => inferred.get(call) ?? call);
}

/** Return exposed and overlapped seconds per step by axis, as means over ranks. Both are null if a call does not have them. */
export function overlap(step) {
  const found = new Map();
  const ranks = step.ranks.size;
  for (const own of step.ranks.values()) {
    const axes = new Map();
    for (const call of inferBlocked(ofStep(own))) {
      if (call.open) continue;
      const { axis } = step.groups[call.group];
      if (!axes.has(axis)) axes.set(axis, []);
      axes.get(axis).push(call);
    }
    for (const [axis, calls] of axes) {
      const busy = union(calls.map((call) => [call.from, call.to]));
      const still = union(listBlocked(calls));
      const row = found.get(axis) ?? { axis, exposed: 0, hidden: 0 };
      const known = row.exposed !== null && calls.every((call) => call.blocked !== null);
      row.exposed = known ? row.exposed + length(still) / ranks : null;
      row.hidden = known ? row.hidden + (length(busy) - shared(busy, still)) / ranks : null;
      found.set(axis, row);
    }
  }
  return [...found.values()].sort((a, b) => byAxis(a.axis, b.axis));
}

/**
 * Return the measured idle share of the pipeline, {share, least, seconds}, or null without a pipeline. The pipeline time is
 * from the first forward to the last backward. A rank is idle if it neither computes nor waits for another axis.
 */
export function bubble(step) {
  const lanes = [...step.ranks.values()].map(ofStep).map((own) => ({ own, work: union(listSpans(own, COMPUTE)) })).filter(({ work }) => work.length > 0);
  const piped = lanes.some(({ own }) => own.calls.some((call) => step.groups[call.group].axis === "pp"));
  if (!piped || lanes.length === 0) return null;
  const from = Math.min(...lanes.map(({ work }) => work[0][0]));
  const to = Math.max(...lanes.map(({ work }) => work[work.length - 1][1]));
  const shares = lanes.map(({ own, work }) => {
    const inPipe = union(listBlocked(own.calls.filter((call) => step.groups[call.group].axis === "pp")));
    const elsewhere = union(listBlocked(own.calls.filter((call) => step.groups[call.group].axis !== "pp")));
    const busy = union([...work, ...elsewhere]);
    const used = shared(busy, [[from, to]]) - shared(inPipe, busy);
    return 1 - used / (to - from);
  });
  return { share: shares.reduce((sum, share) => sum + share, 0) / shares.length, least: Math.min(...shares), seconds: to - from };
}
