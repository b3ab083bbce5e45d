import "./support/browser.js";

import assert from "node:assert/strict";
import test from "node:test";

import { compareAxes, makePrediction } from "../../webapp/static/js/collectives.js";
import { clockWords, crossingRows, levelIn } from "../../webapp/static/js/job/hosts.js";

const MEMBERS = [{ node: 0, first_rank: 0, num_ranks: 2 }, { node: 1, first_rank: 2, num_ranks: 2 }];
const NONE = { predicted: 0, measured: 0 };

test("separates bytes between hosts from bytes inside hosts", () => {
  const ranks = [0, 1, 2, 3].map((rank) => ({ rank, predicted: 10 + rank, measured: 20 + rank }));
  const compared = ["dp", "tp"].map((axis) => ({ axis, level: "", ranks }));
  const rows = crossingRows({ dp: 2, tp: 2 }, MEMBERS, compared);
  const total = { predicted: 46, measured: 86 };
  assert.deepEqual(rows.map((row) => [row.axis, row.groupsAcross, row.across, row.inside]), [
    ["dp", 2, total, NONE],
    ["tp", 0, NONE, total],
    ["world", 1, NONE, NONE],
  ]);
});

test("shards HSDP inside hosts and reduces between hosts", () => {
  const layout = { dp: 4, dp_replicas: 2, zero: 3, tp: 1, pp: 1, cp: 1, ep: 1 };
  const ops = { all_gather: 600, reduce_scatter: 300, all_reduce: 150 };
  const traffic = Object.entries(ops).map(([op, payload_bytes]) => ({ axis: "dp", op, group_size: 2, count: 1, payload_bytes }));
  const stages = [{ traffic, step_bytes: { dp: 1050 } }];
  const estimate = { axes: { pp: 1, dp: 4, cp: 1, tp: 1 }, stages, rank_bytes: {} };
  const exactCells = traffic.map((row) => ({ ...row, payload_bytes: 5 * row.payload_bytes }));
  const ranks = new Map([0, 1, 2, 3].map((rank) => [rank, { exactStep: 5, exactCells }]));
  const compared = compareAxes(ranks, makePrediction(estimate), levelIn(layout));
  const rows = crossingRows(layout, MEMBERS, compared).slice(0, 2);
  assert.deepEqual(rows.map((row) => [row.level, row.groupsAcross, row.across, row.inside]), [
    ["shards", 0, NONE, { predicted: 18000, measured: 18000 }],
    ["replicas", 2, { predicted: 3000, measured: 3000 }, NONE],
  ]);
});

test("shows a clock offset with its margin of error", () => {
  assert.equal(clockWords(null), "not measured");
  assert.equal(clockWords({ offset_s: -300, within_s: 0.0002 }), "+300.00 s ±0.20 ms");
  assert.equal(clockWords({ offset_s: 0.012, within_s: 0.001 }), "−12.0 ms ±1.00 ms");
});
