import assert from "node:assert/strict";
import test from "node:test";

import * as collectives from "../../webapp/static/js/collectives.js";
import { keepStep, mark, MOST_STEPS as MAX_STEPS } from "../../webapp/static/js/fold/steps.js";
import { Bins } from "../../webapp/static/js/rates.js";
import { createState, expectGap, foldBatch, foldSummary, resumeFrom } from "../../webapp/static/js/store.js";
import { MOST_STEPS as MAX_TIMELINES, stepsAtHand } from "../../webapp/static/js/timeline/fold.js";
import { assertClose } from "./support/assertions.js";
import { batch, cell, foldBatches, lateItems, log, sumBins, traffic } from "./support/telemetry.js";

const sum = (row) => row.reduce((total, value) => total + (value ?? 0), 0);

test("puts every counted byte into the bins", () => {
  const batches = Array.from({ length: 10 }, (_, i) => {
    const time = 100 + (i + 1) / 5;
    return batch(time, traffic(0, time, cell(i + 1, 1000 * (i + 1))));
  });
  const state = foldBatches(batches);
  assert.deepEqual([sumBins(state.recent), sumBins(state.whole)], [10_000, 10_000]);
});

test("ignores an older snapshot that arrives late", () => {
  const batches = [batch(100, traffic(0, 100, cell(5, 5000))), batch(101, traffic(0, 101, cell(4, 4000)))];
  assert.equal(sumBins(foldBatches(batches).whole), 5000);
});

test("shows a gap of the stream as a break instead of a spike", () => {
  const state = foldBatches([
    batch(100, traffic(0, 100, cell(1, 1000))),
    "gap",
    batch(110, traffic(0, 110, cell(90, 90_000))),
    batch(111, traffic(0, 111, cell(91, 91_000))),
  ]);
  assert.equal(sumBins(state.whole), 1000 + 1000); // bytes sent during the gap belong to no bin
  assert.ok(state.whole.rate(0, () => true).includes(null));
  assert.equal(state.ranks.get(0).cells.values().next().value.count, 91); // the total stays exact
});

test("shows no spike if the stream was trimmed before the first frame", () => {
  const batches = ["gap", batch(110, traffic(0, 110, cell(90, 90_000))), batch(111, traffic(0, 111, cell(91, 91_000)))];
  assert.equal(sumBins(foldBatches(batches).whole), 1000);
});

test("keeps all bytes of a run when bins are merged", () => {
  const bins = new Bins(0.5, 8, "whole");
  for (let i = 0; i < 100; i += 1) bins.add(0, "dp/all_reduce", 3.5 + i / 4, 10);
  assert.equal(sumBins(bins), 1000);
  assert.ok(bins.length <= 8);
  assert.ok(bins.times()[0] <= 3.5);
  assert.equal(bins.width, 4);
});

test("merges bins once for a batch from before the first bin", () => {
  const bins = new Bins(0.5, 8, "whole");
  for (let i = 0; i < 8; i += 1) bins.add(0, "k", 100 + i / 2, 10);
  bins.add(0, "k", 98, 10);
  assert.deepEqual([bins.width, bins.times()[0], sumBins(bins)], [1, 98, 90]);
});

test("drops the oldest bins of the last minute", () => {
  const bins = new Bins(0.5, 4, "recent");
  for (let i = 0; i < 10; i += 1) bins.add(0, "k", 100 + i / 2, 5);
  assert.equal(bins.length, 4);
  assert.deepEqual(bins.times(), [103, 103.5, 104, 104.5]);
  assert.deepEqual(bins.rate(0, () => true), [10, 10, 10, 10]);
});

test("compares predicted with measured bytes per axis and rank", () => {
  const stage = { traffic: [{ axis: "dp", count: 3 }, { axis: "dp", count: 1 }], step_bytes: { dp: 400 } };
  const axes = { pp: 1, dp: 1, cp: 2, tp: 1 };
  const estimate = { axes, stages: [stage], rank_bytes: { 1: { dp: 300 } } };
  const extra = { axis: "tp", payload_bytes: 7, count: 1 };
  const ranks = new Map([
    [0, { exactStep: 5, exactCells: [{ axis: "dp", payload_bytes: 2000, count: 20 }] }],
    [1, { exactStep: 4, exactCells: [{ axis: "dp", payload_bytes: 1201, count: 16 }, extra] }],
  ]);
  const rows = collectives.compareAxes(ranks, collectives.makePrediction(estimate));
  assert.deepEqual(rows.map((row) => [row.axis, row.predicted, row.measured]), [["dp", 3200, 3201], ["tp", 0, 7]]);
  assert.deepEqual(rows.map((row) => [row.predictedCalls, row.measuredCalls]), [[36, 36], [0, 1]]);
  const calls = { predictedCalls: 16, measuredCalls: 16 };
  assert.deepEqual(rows[0].ranks[1], { rank: 1, predicted: 1200, measured: 1201, ...calls });
});

test("computes bandwidths as nccl-tests does", () => {
  const cells = [[cell(10, 8_000_000, { group_size: 4 })], [cell(10, 8_000_000, { group_size: 4 })]];
  const [row] = collectives.collectiveRows(cells);
  assert.deepEqual([row.count, row.payload_bytes], [20, 16_000_000]);
  assertClose([row.mean_s, row.algbw, row.busbw], [0.01, 80e6, (80e6 * 2 * 3) / 4]);
});

test("shows the summary of a run until the stream replays", () => {
  const summary = {
    ...{ steps: 3, tokens_per_s: 10, eval_losses: [], verdict: {} },
    losses: [{ step: 1, loss: 5, time: 1 }],
    cells: { 0: [cell(3, 3000)] },
  };
  const state = createState();
  foldSummary(state, summary);
  assert.equal(state.ranks.get(0).exactCells[0].payload_bytes, 3000);
  foldBatch(state, "1-0", batch(1, traffic(0, 1, cell(1, 1000))));
  assert.equal(state.steps.get(1).loss, 5);
  assert.equal([...state.ranks.get(0).cells.values()][0].payload_bytes, 1000);
  assert.equal(state.fromSummary, false);
});

test("refuses telemetry of another attempt or version", () => {
  const state = createState();
  foldBatch(state, "1-0", batch(1));
  assert.equal(foldBatch(state, "2-0", { ...batch(1), attempt: 2 }), false);
  assert.equal(resumeFrom(state), "0:1-0");
  assert.throws(() => foldBatch(state, "3-0", { ...batch(1), v: 2 }), /version 2/);
});

test("resumes a log without duplicates and marks skipped lines", () => {
  const { lines } = foldBatches([
    batch(1, log(0, 0, "a", "b")),
    batch(2, log(0, 1, "b", "c")),
    batch(3, log(0, 5, "f")),
  ]).logs.get(0);
  assert.deepEqual(lines.map((line) => line.text ?? line.skipped), ["a", "b", "c", 2, "f"]);
  assert.deepEqual(lines.filter((line) => "text" in line).map((line) => line.number), [0, 1, 2, 5]);
});

test("folds the streams of several hosts, each with its own position and gaps", () => {
  const state = createState();
  const hostLog = (line) => ({ ...log(-1, 0, line), time: 0 });
  foldBatch(state, "5-0", { ...batch(100, traffic(0, 100, cell(1, 1000)), hostLog("of anna")), host: "anna" }, 0);
  // This host started earlier, and its stream is read second.
  foldBatch(state, "3-0", { ...batch(40, traffic(2, 40, cell(1, 500)), hostLog("of bert")), host: "bert" }, 1);
  assert.equal(resumeFrom(state), "0:5-0,1:3-0");
  expectGap(state, 1);
  const clock = { offset_s: -300, within_s: 0.001 };
  foldBatch(state, "9-0", { ...batch(60, traffic(2, 60, cell(3, 9500))), host: "bert", clock }, 1);
  foldBatch(state, "6-0", batch(101, traffic(0, 101, cell(2, 3000))), 0);
  assert.equal(resumeFrom(state), "0:6-0,1:9-0");
  const binned = (rank) => sum([...(state.whole.rows.get(rank) ?? new Map()).values()].flat());
  assert.equal(binned(0), 3000); // the gap of one host changes no rate of another host
  assert.equal(binned(2), 500); // bytes sent in a gap are counted, but in no rate
  assert.equal(state.ranks.get(2).cells.size, 1);
  const logs = [...state.logs].map(([key, { node, lines }]) => [key, node, lines.map((line) => line.text)]);
  assert.deepEqual(logs, [[-1, 0, ["of anna"]], [-2, 1, ["of bert"]]]);
  assert.deepEqual([state.members.get(1).host, state.members.get(1).clock.offset_s], ["bert", -300]);
});

test("keeps evenly spaced steps of a long run and its newest loss", () => {
  const state = createState();
  const last = 50_001;
  for (let step = 1; step <= last; step += 1) keepStep(state, step, { time: step, loss: step === last ? null : -step });
  const steps = [...state.steps.keys()];
  assert.equal(state.stride, 4);
  assert.ok(steps.length <= MAX_STEPS);
  assert.ok(steps.every((step) => step % state.stride === 0));
  assert.equal(steps.at(-1), 50_000);
  assert.deepEqual(state.lastLoss, { step: 50_000, loss: -50_000 });
});

test("marks only the first step of a series without a finite loss", () => {
  const state = createState();
  for (const step of [5, 5, 6, 7, 6, 8, 20, 21]) mark(state, { kind: "fault", time: step, step, text: "loss is nan" });
  assert.deepEqual([...state.marks.values()].map((one) => one.step), [5, 20]);
  for (let step = 1; step <= 2100; step += 1) mark(state, { kind: "checkpoint", time: step, step, text: "" });
  assert.deepEqual([state.marks.size, [...state.marks.values()].at(-1).step], [2000, 2100]);
});

test("keeps timelines of the newest steps only", () => {
  const state = foldBatches(Array.from({ length: 40 }, (_, i) => batch(i + 1, ...lateItems(i + 1))));
  const expected = Array.from({ length: MAX_TIMELINES }, (_, i) => ({ step: 40 - i, ranks: 2 }));
  assert.deepEqual(stepsAtHand(state), expected);
});

test("spreads exposed communication over its step", () => {
  const parts = { data: 0, optimizer: 0, exposed: { dp: 2 }, hidden: {} };
  const step = { kind: "step", rank: 3, time: 110, step: 1, ran: 1, steps: 9, step_s: 4, tokens: 1, parts };
  const state = foldBatches([batch(110, { ...step, loss: null, grad_norm: null, learning_rate: 0.1, cells: [] })]);
  const row = state.still.whole.rows.get(3).get("dp/");
  assertClose(sum(row), 2);
  assert.equal(row.filter((value) => value > 0).length, 8);
});

test("shows unknown values of a script as unknown", () => {
  const script = { kind: "step", rank: 0, steps: null, tokens: null, loss: null, grad_norm: null, learning_rate: null, cells: [] };
  const item = (step, more) => ({ ...script, time: step, step, ran: step, counted: step - 2, step_s: 0.5, parts: { exposed: {}, hidden: {} }, ...more });
  const state = foldBatches([batch(10, item(4)), batch(12, item(6, { over: 2, times: [0.25, 0.75], samples: 8 }))]);
  assert.deepEqual(state.stepTimes, [0.5, 0.25, 0.75]);
  assert.equal(state.ranks.get(0).exactStep, 4);
  assert.deepEqual([state.progress.steps, state.progress.rate, state.progress.sample_rate, state.progress.over], [null, null, 16, 2]);
  assert.deepEqual(state.ranks.get(0).parts[0], { step_s: 0.5, data: null, optimizer: null, exposed: {}, hidden: {} });
  assert.equal(state.lastLoss, null);
  const later = foldBatches([batch(10, item(4, { samples: 8 })), batch(11, { kind: "phase", rank: 0, time: 11, phase: "step", steps: 5 })]);
  assert.deepEqual([later.progress.step, later.progress.sample_rate], [5, 16]);
});
