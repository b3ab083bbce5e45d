// Telemetry that a page receives: batches, traffic, logs, and timelines of steps.

import { createState, expectGap, foldBatch } from "../../../webapp/static/js/store.js";
import { stepOfItems } from "../../../webapp/static/js/timeline/step.js";

/** Return a counter cell of an all-reduce over dp. */
export function cell(count, payloadBytes, other = {}) {
  const base = { phase: "step", op: "all_reduce", axis: "dp", group_size: 2, busy_s: 0.01 * count };
  const bytes = { payload_bytes: payloadBytes, algorithmic_bytes: payloadBytes };
  return { ...base, count, completed: count, ...bytes, ...other };
}

export function traffic(rank, time, ...cells) {
  return { kind: "traffic", rank, time, cells, dropped: 0 };
}

export function log(rank, first, ...lines) {
  return { kind: "log", rank, time: 1, first, lines };
}

export function batch(time, ...items) {
  return { v: 1, job: "j", attempt: 1, time, items };
}

/** Return the state of a page after these batches. "gap" marks lost stream entries. */
export function foldBatches(batches) {
  const state = createState();
  batches.forEach((one, i) => (one === "gap" ? expectGap(state) : foldBatch(state, `${i}-0`, one)));
  return state;
}

/** Return the sum of all bins. */
export function sumBins(bins) {
  const rows = [...bins.rows.values()].flatMap((keys) => [...keys.values()]).flat();
  return rows.reduce((sum, value) => sum + (value ?? 0), 0);
}

const CALL_COLUMNS = ["group", "op", "sequence", "issued_us", "blocked_us", "ended_us", "payload_bytes", "peer"];
const SPAN_COLUMNS = ["work", "chunk", "micro_batch", "from_us", "to_us"];

function toColumns(names, rows) {
  return Object.fromEntries(names.map((name, at) => [name, rows.map((row) => row[at])]));
}

/** Return a rank's timeline of step 8. Rows of `calls` and `spans` are in the order of the columns above. */
export function timelineItem(rank, { calls = [], spans = [], groups, step = 8 } = {}) {
  const began = 1000;
  const step_s = 0.1;
  return {
    kind: "timeline",
    rank,
    time: began + step_s,
    step,
    began,
    step_s,
    groups: groups ?? [{ axis: "dp", ranks: [0, 1], nth: 0 }],
    calls: toColumns(CALL_COLUMNS, calls),
    spans: toColumns(SPAN_COLUMNS, spans),
    left_out: 0,
  };
}

/** Return timelines of two ranks: rank 1 enters the all-reduce 30 ms late, and the transfer takes 10 ms. */
export function lateItems(step = 8) {
  const fast = [["forward", 0, 0, 0, 20_000], ["backward", 0, 0, 20_000, 50_000]];
  const slow = [["forward", 0, 0, 0, 40_000], ["backward", 0, 0, 40_000, 80_000]];
  return [
    timelineItem(0, { step, spans: fast, calls: [[0, "all_reduce", 1, 50_000, 40_000, 90_000, 4000, -1]] }),
    timelineItem(1, { step, spans: slow, calls: [[0, "all_reduce", 1, 80_000, 10_000, 90_000, 4000, -1]] }),
  ];
}

/** Return the step that a page makes of timelines of its ranks. */
export function stepFromItems(items) {
  return stepOfItems(items[0].step, new Map(items.map((item) => [item.rank, { item, node: 0 }])), () => 0);
}
