// The metrics that a script reports, on the page of its job.
import assert from "node:assert/strict";
import { test } from "node:test";
import { drawLines, fit, formatMetric } from "../../webapp/static/js/charts/metriclines.js";
import { canonicalName, findLastLoss, foldMetric, foldStoredMetrics, groupByName, isLoss, selectSeries } from "../../webapp/static/js/fold/metrics.js";
import { createState } from "../../webapp/static/js/store.js";

const item = (step, values, more = {}) => ({ kind: "metric", rank: 0, time: step, step, source: "log line", values, ...more });

test("names of one quantity are equal, and name a loss", () => {
  for (const name of ["loss", "train/loss", "train_loss", "Loss/train", "training loss"]) assert.equal(canonicalName(name), "loss");
  assert.deepEqual(["lm loss", "train/loss_step", "val_loss", "loss scale", "train"].map(isLoss), [true, true, false, false, false]);
});

test("the preferred source of a rank replaces the others", () => {
  const state = createState();
  foldMetric(state, item(1, { loss: 3, mfu: 1 }));
  foldMetric(state, item(1, { "train/loss": 2 }, { source: "wandb" }));
  foldMetric(state, item(1, { loss: 4 }, { rank: 1 }));
  const groups = groupByName(selectSeries(state.metrics));
  assert.deepEqual(groups.map(({ name, sources, lines }) => [name, sources, lines.map(({ rank }) => rank)]), [
    ["loss", ["log line"], [1]],
    ["train/loss", ["wandb"], [0]],
    ["mfu", ["log line"], [0]],
  ]);
});

test("the last loss of a script is of the preferred series", () => {
  const state = createState();
  assert.equal(findLastLoss(state.metrics), null);
  foldMetric(state, item(4, { val_loss: 9 }));
  assert.equal(findLastLoss(state.metrics), null);
  foldMetric(state, item(5, { loss_epoch: 8 }));
  foldMetric(state, item(3, { loss: 4 }, { rank: 1 }));
  foldMetric(state, item(1, { loss: 3 }));
  foldMetric(state, item(2, {}, { not_finite: { loss: "nan" } }));
  assert.deepEqual(findLastLoss(state.metrics), { step: 2, loss: null, words: "nan", source: "log line" });
  foldMetric(state, item(1, { "train/lm_loss": 2 }, { source: "wandb", rank: 2 }));
  assert.deepEqual(findLastLoss(state.metrics), { step: 1, loss: 2, words: null, source: "wandb" });
});

test("a value that is not finite is a gap with a mark", () => {
  const state = createState();
  foldMetric(state, item(1, { loss: 3 }));
  foldMetric(state, item(2, {}, { not_finite: { loss: "nan" }, left_out: { names: 1, rate: 2, invalid: 3 } }));
  foldMetric(state, item(12, {}, { not_finite: { loss: "nan" } }));
  const [{ points }] = state.metrics.values();
  assert.deepEqual([...points.values()].map(({ value, words }) => [value, words]), [[3, null], [null, "nan"], [null, "nan"]]);
  assert.deepEqual([...state.marks.values()].map(({ kind, step, text }) => [kind, step, text]), [["fault", null, "loss is nan"]]);
  assert.deepEqual(state.metricsLeftOut.get(0), { names: 1, rate: 2, invalid: 3 });
});

test("a long series is thinned and keeps its last value", () => {
  const state = createState();
  for (let step = 1; step <= 10_001; step += 1) foldMetric(state, item(step, { loss: step }));
  const [{ points }] = state.metrics.values();
  assert.ok(points.size <= 4000);
  assert.equal([...points.keys()].at(-1), 10_001);
});

test("a stored history and live items form one series", () => {
  const state = createState();
  const stored = { name: "loss", source: "log line", rank: 0, step: [1, 2], time: [1, 2], value: [3, null], not_finite: [null, "inf"] };
  foldStoredMetrics(state, { series: [stored], hidden_series: 4, left_out: { 1: { names: 1, rate: 0, invalid: 0 } } });
  foldMetric(state, item(3, { loss: 1 }));
  const [{ points }] = state.metrics.values();
  assert.deepEqual([...points.keys()], [1, 2, 3]);
  assert.equal(state.hiddenSeries, 4);
  assert.equal(state.metricsLeftOut.get(1).names, 1);
});

test("a line per rank, or one line with its smoothed values", () => {
  const points = [{ step: 1, time: 5, value: 2 }, { step: 2, time: 6, value: 1 }];
  const one = drawLines([{ rank: 0, points }], "loss", true, 0.5);
  assert.deepEqual(one.lines.map(({ label }) => label), ["loss", "smoothed"]);
  const two = drawLines([{ rank: 0, points }, { rank: 3, points }], "loss", false, 0.5);
  assert.deepEqual(two.lines.map(({ label }) => label), ["rank 0", "rank 3"]);
  assert.deepEqual(two.columns[0], [5, 6]);
});

test("a range of rounding errors is wide enough for ticks", () => {
  for (const [low, high] of [[1, 1 + 2e-16], [1, 1], [0, 0], [-5, -5], [0, 1e-12]]) {
    const [from, to] = fit(null, low, high);
    assert.ok(to - from > 1e-7 * Math.max(Math.abs(low), Math.abs(high)), `${low} to ${high}`);
  }
  assert.deepEqual(fit(null, null, null), [0, 1]);
});

test("values have six digits", () => {
  assert.deepEqual([0, 2.3456789, 1234567, 0.00001234, -0.5].map((value) => formatMetric(value)), ["0", "2.34568", "1.235e+6", "1.234e-5", "-0.5"]);
});
