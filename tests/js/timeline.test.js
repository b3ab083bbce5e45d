import "./support/browser.js";

import assert from "node:assert/strict";
import test from "node:test";

import { computeCells } from "../../webapp/static/js/heat/cells.js";
import { computeShade } from "../../webapp/static/js/heat/scale.js";
import { Bins } from "../../webapp/static/js/rates.js";
import { arrangeRows } from "../../webapp/static/js/timeline/lanes.js";
import { paint, tickText } from "../../webapp/static/js/timeline/paint.js";
import { bubble, collectiveTimes, groupBandwidths, overlap } from "../../webapp/static/js/timeline/stats.js";
import { stepOfTables } from "../../webapp/static/js/timeline/step.js";
import { ofStep } from "../../webapp/static/js/heat/spread.js";
import { describeEvent } from "../../webapp/static/js/timeline/words.js";
import { findLink } from "../../webapp/static/js/timeline/tables.js";
import { moved, zoomed } from "../../webapp/static/js/timeline/window.js";
import { assertClose } from "./support/assertions.js";
import { lateItems, stepFromItems, timelineItem } from "./support/telemetry.js";

const PP = { axis: "pp", ranks: [0, 1], nth: 0 };
const DP = { axis: "dp", ranks: [0, 1], nth: 0 };

test("computes percentiles, bandwidth, and overlap of a late rank", () => {
  // The transfer of 10 ms moves 2 x 4,000 / 2 bytes. Rank 0 waits 40 ms, rank 1 waits 10 ms.
  const step = stepFromItems(lateItems());
  const [times] = collectiveTimes(step);
  assert.deepEqual([times.calls, times.slowest, times.lastRank, times.lastShare], [2, 0, 1, 1]);
  assertClose([times.p50, times.p90, times.p99, times.wait50], [0.01, 0.04, 0.04, 0.03]);
  const [group] = groupBandwidths(step);
  assert.deepEqual([[...group.ops], group.ranks], [["all_reduce"], [0, 1]]);
  assertClose(group.busbw, 4000 / 0.01);
  const [dp] = overlap(step);
  assertClose([dp.exposed, dp.hidden], [0.025, 0]);
  assert.equal(bubble(step), null); // no pipeline
});

/** Return a step of two ranks, whose all-reduce has no recorded bytes and exposed time, as in gloo traces. */
function unknownStep() {
  const calls = { rank: [0, 1], axis: ["dp", "dp"], ranks: [[0, 1], [0, 1]], nth: [0, 0], op: ["all_reduce", "all_reduce"] };
  Object.assign(calls, { sequence: [1, 1], issued: [10, 10.03], ended: [10.04, 10.04], blocked_s: [null, null] });
  return stepOfTables(1, { ...calls, payload_bytes: [null, null], peer: [-1, -1] }, {});
}

test("shows unknown bytes and exposed time as unknown, never as 0", () => {
  const step = unknownStep();
  assert.deepEqual(groupBandwidths(step), []);
  assert.deepEqual(overlap(step), [{ axis: "dp", exposed: null, hidden: null }]);
  assert.equal(ofStep(step, 2, () => true, () => 1), null);
  const words = describeEvent(step.ranks.get(0).calls[0], step);
  assert.match(words, /bytes unknown/);
  assert.match(words, /exposed time unknown/);
  assert.doesNotMatch(words, /\b0 B/);
});

test("leaves calls of unknown bytes out of the bandwidth of their group", () => {
  const step = stepFromItems(lateItems());
  step.ranks.get(0).calls[0].bytes = null;
  const [group] = groupBandwidths(step);
  assert.equal(group.calls, 1);
  assertClose(group.busbw, 4000 / 0.01);
});

test("names no last rank if ranks enter together", () => {
  const calls = [[0, "all_reduce", 1, 10, 10, 20, 8, -1]];
  const step = stepFromItems([0, 1].map((rank) => timelineItem(rank, { calls })));
  assert.equal(collectiveTimes(step)[0].lastRank, null);
});

test("counts time without compute or other axes as the bubble", () => {
  // Each stage computes 20 of 40 ms, and stage 1 waits 4 ms for dp. A forward that waits for its receive is idle.
  const first = timelineItem(0, {
    groups: [PP, DP],
    spans: [["forward", 0, 0, 0, 10_000], ["backward", 0, 0, 20_000, 40_000]],
    calls: [[0, "recv", 1, 20_000, 10_000, 30_000, 8, 1]],
  });
  const second = timelineItem(1, {
    groups: [PP, DP],
    spans: [["forward", 1, 0, 10_000, 20_000], ["backward", 1, 0, 20_000, 30_000]],
    calls: [[1, "all_reduce", 1, 34_000, 4_000, 38_000, 8, -1]],
  });
  const found = bubble(stepFromItems([first, second]));
  assertClose(found, { share: (20 / 40 + 16 / 40) / 2, least: 0.4, seconds: 0.04 });
});

test("infers the wait of DDP's reducer for its last bucket", () => {
  const measure = (backwardEnd) => {
    const calls = [[0, "all_reduce", 1, 10_000, 0, 20_000, 8, -1], [0, "all_reduce", 2, 30_000, 0, 36_000, 8, -1]];
    const items = [0, 1].map((rank) => timelineItem(rank, { spans: [["backward", -1, -1, 0, backwardEnd]], calls }));
    const [dp] = overlap(stepFromItems(items));
    return dp;
  };
  const waits = measure(36_500);
  assertClose([waits.exposed, waits.hidden], [0.006, 0.01]);
  const continues = measure(50_000); // Backward ends long after the last bucket, so it did not wait.
  assertClose([continues.exposed, continues.hidden], [0, 0.016]);
});

test("excludes validation after the step from its bubble and overlap", () => {
  const validation = [["eval", -1, -1, 40_000, 90_000], ["forward", 0, 0, 50_000, 80_000]];
  const measure = (validates) => {
    const items = [0, 1].map((rank) => {
      const spans = [["forward", 0, 0, 0, 10_000], ["backward", 0, 0, 20_000, 40_000]];
      const calls = [[0, "recv", 1, 10_000, 10_000, 20_000, 8, 1 - rank]];
      if (validates) {
        spans.push(...validation);
        calls.push([0, "recv", 2, 60_000, 9_000, 69_000, 8, 1 - rank]);
      }
      return timelineItem(rank, { groups: [PP], spans, calls });
    });
    const step = stepFromItems(items);
    return [bubble(step), overlap(step)];
  };
  const alone = measure(false);
  assert.deepEqual(measure(true), alone);
  assertClose(alone[0].seconds, 0.04);
});

test("zooms around the pointer and stays inside the step", () => {
  const near = zoomed({ from: 0, to: 10 }, 10, 2, 8);
  assert.deepEqual(near, { from: 4, to: 9 });
  assert.deepEqual(zoomed(near, 10, 0.01), { from: 0, to: 10 });
  assert.deepEqual(moved(near, 10, 100), { from: 5, to: 10 });
  assert.deepEqual(moved(near, 10, -100), { from: 0, to: 5 });
});

test("gives ticks enough digits to differ", () => {
  for (const [time, gap, text] of [[0.02, 0.005, "20 ms"], [2e-6, 5e-7, "2.0 µs"], [1.5, 1, "2 s"]]) {
    assert.equal(tickText(time, gap), text);
  }
});

const FRAME = { height: 200, left: 64, top: 0, rowHeight: 16, gap: 4 };
const INK = () => "#123456";

/** Return a canvas context on which every text is `width` wide, and calls `fillText` for each text. */
function recordingContext(width, fillText) {
  const pen = { fillText, measureText: () => ({ width }) };
  return new Proxy(pen, { get: (own, name) => own[name] ?? (() => {}) });
}

test("draws at most two boxes per pixel and color", () => {
  const calls = Array.from({ length: 2000 }, (_, i) => [0, "all_reduce", i + 1, 10 * i + 10, 1, 10 * i + 14, 8, -1]);
  const spans = Array.from({ length: 2000 }, (_, n) => ["forward", 0, n % 8, 10 * n, 10 * n + 9]);
  const step = stepFromItems([timelineItem(0, { calls, spans })]);
  const token = (event) => String(event.micro ?? "c");
  const context = recordingContext(10, () => {});
  const draw = (view) => paint(context, arrangeRows(step), step, view, { ...FRAME, width: 124 }, INK, token);
  const whole = draw({ from: 0, to: step.seconds });
  assert.ok(whole > 60 && whole <= 2 * 2 * 61, `${whole} boxes`);
  const close = draw({ from: 0, to: step.seconds / 200 });
  assert.ok(close >= 15 && close <= 40, `${close} boxes`);
});

test("draws no name over the name of an event that runs at the same time", () => {
  const calls = Array.from({ length: 11 }, (_, i) => [0, "all_reduce", i + 1, 40 * i + 40, 1, 40 * i + 540, 8, -1]);
  const step = stepFromItems([timelineItem(0, { calls })]);
  const texts = [];
  const context = recordingContext(60, (text, at) => text === "all_reduce" && texts.push([at, at + 60]));
  paint(context, arrangeRows(step), step, { from: 0, to: step.seconds }, { ...FRAME, width: 1064 }, INK, () => "c");
  assert.ok(texts.length > 3);
  for (let i = 1; i < texts.length; i += 1) assert.ok(texts[i - 1][1] <= texts[i][0], JSON.stringify(texts));
});

test("states the source of the speed of a link", () => {
  const links = { name: "h", basis: "data sheet", per_node: 2, node_bytes_per_s: 8, network_bytes_per_s: 1 };
  const cases = [
    [[0, 1], 0, "inside a host, data sheet of h", false],
    [[0, 1], 1, "inside a host, from 1 run of h", true],
    [[0, 1], 2, "inside a host, from 2 runs of h", true],
    [[0, 2], 2, "between hosts, data sheet of h", false],
  ];
  for (const [ranks, runs, words, measured] of cases) {
    const link = findLink(ranks, { ...links, link_runs: runs }, []);
    assert.deepEqual([link.words, link.measured], [words, measured]);
  }
});

test("shades larger values darker and zero not at all", () => {
  assert.deepEqual([0, 1e-9, 0.25, 1, 5, NaN].map((value) => computeShade(value, 1)), [0, 1, 128, 255, 255, 0]);
});

test("keeps the window and the gaps of the heatmap over time", () => {
  const bins = new Bins(0.5, 100, "whole");
  for (let i = 0; i < 10; i += 1) {
    bins.add(0, "dp/a", 100 + i / 2, 5);
    bins.add(7, "tp/a", 100 + i / 2, 1);
  }
  bins.hole(102, 102.4);
  const plain = ({ cells, columns, most }) => [[...cells].map((v) => (Number.isNaN(v) ? "gap" : v)), columns, most];
  const row = (value) => [...Array(4).fill(value), "gap", ...Array(4).fill(value)];
  assert.deepEqual(plain(computeCells(bins, [0, 7], () => true, { filling: true })), [[...row(10), ...row(2)], 9, 10]);
  const part = computeCells(bins, [0, 7], (key) => key.startsWith("tp"), { from: 101, to: 102 });
  assert.deepEqual(plain(part), [[0, 0, "gap", 2, 2, "gap"], 3, 2]);
});
