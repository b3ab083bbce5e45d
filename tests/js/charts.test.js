import "./support/browser.js";

import assert from "node:assert/strict";
import test from "node:test";

import { getExtent } from "../../webapp/static/js/charts/extent.js";
import { gaugeLines, memoryFields, memoryLines } from "../../webapp/static/js/charts/gauges.js";
import { drawMarks, letterPlaces, marksIn, markWords } from "../../webapp/static/js/charts/marks.js";
import { nearestKnown } from "../../webapp/static/js/charts/plot.js";
import { smooth } from "../../webapp/static/js/charts/smooth.js";
import { xSplits } from "../../webapp/static/js/charts/theme.js";
import * as ticks from "../../webapp/static/js/charts/ticks.js";
import { trafficLines } from "../../webapp/static/js/charts/traffic.js";
import { createView, readView } from "../../webapp/static/js/charts/view.js";
import { foldGauge } from "../../webapp/static/js/fold/gauges.js";
import { bytes } from "../../webapp/static/js/format.js";
import { Bins } from "../../webapp/static/js/rates.js";
import { createState, foldBatch } from "../../webapp/static/js/store.js";
import { assertClose } from "./support/assertions.js";
import { batch } from "./support/telemetry.js";

test("reads the range and the cursor from an address and ignores invalid values", () => {
  const cases = [
    ["", [null, null, null, null]],
    ["?from=10.5&to=20&at=12", [10.5, 20, null, 12]],
    ["?from=20&to=10", [null, null, null, null]],
    ["?from=10", [null, null, null, null]],
    ["?from=&to=1e999&last=60", [null, null, 60, null]],
    ["?last=-5&at=<b>", [null, null, null, null]],
    ["?from=10&to=20&last=60", [10, 20, null, null]],
  ];
  for (const [search, expected] of cases) {
    const view = readView(search);
    assert.deepEqual([view.from, view.to, view.last, view.at], expected, search);
  }
});

test("writes a range into the address and keeps other parameters", () => {
  let address = "?tab=2";
  let changes = 0;
  const view = createView(() => address, (search) => (address = search));
  const assertView = (search, window) => assert.deepEqual([address, view.window()], [search, window]);
  view.subscribe(() => (changes += 1));
  view.extend(100, 200);
  assertView("?tab=2", [100, 200]);
  view.zoom(120.12345, 130);
  assertView("?tab=2&from=120.123&to=130", [120.12345, 130]);
  view.zoom(130, 130);
  assertView("?tab=2&from=120.123&to=130", [120.12345, 130]);
  view.pin(125);
  assertView("?tab=2&from=120.123&to=130&at=125", [120.12345, 130]);
  view.follow(60);
  assertView("?tab=2&at=125&last=60", [140, 200]);
  view.pin(null);
  view.follow(null);
  assertView("?tab=2", [100, 200]);
  assert.equal(changes, 5);
});

test("smooths values, keeps gaps, and changes nothing at weight 0", () => {
  assertClose(smooth([5, null, 5, 5], 0.9), [5, null, 5, 5]);
  assertClose(smooth([0, 10, 0, 10], 0.5), [0, 20 / 3, 20 / 7, 20 / 3]);
  assert.deepEqual(smooth([1, 2], 0), [1, 2]);
});

test("maps steps to times and back on an axis that is linear in steps", () => {
  const steps = Array.from({ length: 40 }, (_, i) => i + 1);
  const time = steps.map((step) => 100 + step * 0.5 + (step > 20 ? 30 : 0)); // a checkpoint after step 20
  const curve = { step: steps, time, step_s: steps.map(() => 0.5) };
  assert.deepEqual(ticks.stepSplits(1, 40, 5), [10, 20, 30, 40]);
  assert.equal(ticks.stepAt(curve, time[9] + 0.1), 10);
  assert.equal(ticks.stepAt(curve, time[0] - 1), null);
  const times = [0, 1, 20, 20.5, 40, 99].map((step) => ticks.findTime(curve, step));
  assert.deepEqual(times, [100, 100.5, 110, 125.25, 150, 150]);
  assert.deepEqual([0, 100, 110, 150, 999].map((at) => ticks.findStep(curve, at)), [0, 0, 20, 40, 40]);
  assert.ok(Math.abs(ticks.findStep(curve, 125) - 20.49) < 0.01);
});

test("gives a value axis at least three ticks", () => {
  for (const [low, high] of [[0, 1], [0, 9.9], [1.98, 2.11], [0, 3e-4], [0, 1.1e9], [-4, -3.9]]) {
    const splits = ticks.valueSplits(low, high, 2);
    assert.ok(splits.length >= 3, `${low} to ${high}`);
    assert.ok(low <= splits[0] && splits[0] < splits.at(-1) && splits.at(-1) <= high + 1e-9);
  }
});

test("gives a time axis at least three ticks", () => {
  for (const span of [0.5, 5, 3600, 864_000]) assert.ok(ticks.clockSplits(1e9, 1e9 + span, 2).length >= 3, span);
});

test("gives a narrow time axis few ticks", () => {
  const start = 1.8e9 + 13; // seconds, with the first round time far from the edge
  for (const limit of [2, 3.6, 5]) {
    for (const span of [22, 71, 708, 862, 4789, 39_999]) {
      const { length } = ticks.clockSplits(start, start + span, limit);
      assert.ok(length >= 3 && length <= Math.max(4, limit + 1), `${span} s, limit ${limit}: ${length} ticks`);
    }
  }
});

test("keeps every tick of a time axis inside its range", () => {
  const start = 1.8e9 + 0.13; // seconds
  for (const span of [0.5, 1.7, 9.4, 100]) {
    const outside = ticks.clockSplits(start, start + span, 8).filter((tick) => tick < start || tick > start + span);
    assert.deepEqual(outside, []);
  }
});

test("limits ticks by the width of the plot instead of the chart", () => {
  const splits = xSplits((_min, _max, limit) => [limit], (_, shown) => shown.map(() => ""));
  const ctx = { save: () => {}, restore: () => {}, measureText: () => ({ width: 0 }) };
  const [narrow, wide] = [144, 720].map((width) => ({ bbox: { width: width * devicePixelRatio }, width: 1000, ctx }));
  assert.deepEqual(splits(narrow, 0, 0, 9), [2]);
  assert.deepEqual(splits(wide, 0, 0, 9), [10]);
});

test("leaves space between the labels of an x axis", () => {
  const LETTER_PX = 6.5; // mean width of a digit at 12 px
  const MIN_GAP_PX = 4;
  const measureText = (text) => ({ width: text.length * LETTER_PX });
  const ctx = { save: () => {}, restore: () => {}, measureText };
  const midnight = new Date(2026, 10, 30).getTime() / 1000;
  const splits = xSplits(ticks.clockSplits, ticks.clockTicks);
  const lines = (label) => label.split("\n");
  for (const width of [160, 200, 230, 260, 330, 800]) {
    for (const start of [midnight - 40, midnight + 36_013]) {
      for (const span of [0.7, 4.5, 22, 52, 71, 708, 4789, 39_999]) {
        const chart = { bbox: { width: width * devicePixelRatio }, ctx };
        const shown = splits(chart, 0, start, start + span);
        const labels = ticks.clockTicks(null, shown);
        assert.ok(shown.length >= 1, `${span} s on ${width} px`);
        for (let index = 1; index < shown.length; index += 1) {
          const distance = ((shown[index] - shown[index - 1]) / span) * width;
          for (const line of [0, 1]) {
            const [left, right] = [labels[index - 1], labels[index]].map((label) => lines(label)[line]);
            if (left === undefined || right === undefined) continue;
            const half = (measureText(left).width + measureText(right).width) / 2;
            assert.ok(distance - half >= MIN_GAP_PX, `${left} touches ${right} on ${width} px`);
          }
        }
      }
    }
  }
});

test("gives the ticks of an axis different labels", () => {
  const cases = [
    [[1.0, 1.5, 2.0], ["1.00", "1.50", "2.00"]],
    [[2.001, 2.002, 2.003], ["2.001", "2.002", "2.003"]],
    [[1.02, 1.0205, 1.021], ["1.0200", "1.0205", "1.0210"]],
    [[5_001_000, 5_002_000], ["5.001e+6", "5.002e+6"]],
    [[1.02000001, 1.02000002, 1.02000004], ["1.02", "+1e-8", "+3e-8"]], // more digits would not fit
    [[1e9, 1e9 + 1, 1e9 + 2], ["1.00e+9", "+1", "+2"]],
    [[1.015, null, 1.016, 1.017], ["1.015", "", "1.016", "1.017"]], // uPlot leaves out ticks as null
  ];
  const words = ticks.tickWords((value) => value.toPrecision(3));
  for (const [values, labels] of cases) assert.deepEqual(words(null, values), labels);
});

test("labels a logarithmic axis that has no tick at a power of 16", () => {
  const KIB = 1024;
  const cases = [
    [[128 * KIB, 256 * KIB, 512 * KIB], ["128 KiB", "256 KiB", "512 KiB"]],
    [[32 * KIB, 64 * KIB, 128 * KIB, null], ["32.0 KiB", "64.0 KiB", "128 KiB", ""]],
    [[null, 256 * KIB], ["", "256 KiB"]],
  ];
  const words = ticks.roundTicks((tick) => Math.log2(tick) % 4 === 0, bytes);
  for (const [values, labels] of cases) assert.deepEqual(words(null, values), labels);
});

test("stacks axes to their sum and keeps the bytes of each axis", () => {
  const bins = new Bins(1, 10, "whole");
  bins.add(0, "dp/all_reduce", 10, 5);
  bins.add(1, "dp/all_reduce", 10, 7);
  bins.add(0, "tp/all_reduce", 11, 3);
  const found = trafficLines(bins, "axis", () => true, false);
  assert.deepEqual(found.lines.map((line) => [line.label, line.own]), [["tp", [0, 3]], ["dp", [12, 0]]]);
  assert.deepEqual(found.columns, [[10, 11], [12, 3], [12, 0]]);
  const growing = trafficLines(bins, "axis", () => true, true); // without the bin that is not full yet
  assert.equal(growing.columns[0].length, 1);
  assert.equal(growing.lines[0].own.length, 1);
});

test("drops validations before faults if there are many marks", () => {
  const marks = Array.from({ length: 100 }, (_, i) => ({ kind: "validation", time: i, step: i, text: "" }));
  marks.push({ kind: "fault", time: 50.5, step: 50, text: "loss is nan" });
  assert.deepEqual(marksIn(marks, 0, 100).map((mark) => mark.kind), ["fault"]);
  assert.equal(marksIn(marks, 40, 60).length, 22);
  assert.equal(markWords(marks.at(-1)), "fault at step 50: loss is nan");
  assert.equal(markWords(marks[7]), "validation after step 7");
});

test("places letters of close marks next to each other", () => {
  const cases = [
    ["C100 V101", "C100 V110"],
    ["V100 V104 V108 V112", "V100 V112"],
    ["C100 V104 C107 !108 V140", "C100 V110 !120 V140"],
    ["C290 V292 !294", "C275 V285 !295"], // moved left by the width that they need
  ];
  const parse = (text) => text.split(" ").map((word) => ({ kind: word[0], x: Number(word.slice(1)) }));
  for (const [marks, letters] of cases) assert.deepEqual(letterPlaces(parse(marks), 10, 295), parse(letters));
});

test("draws one line per pixel for any number of marks", () => {
  const lines = [];
  const ignore = () => {};
  const ctx = {
    canvas: { width: 100 },
    ...{ save: ignore, restore: ignore, setLineDash: ignore, beginPath: ignore, stroke: ignore, lineTo: ignore },
    ...{ fillRect: ignore, fillText: ignore },
    moveTo: (at) => lines.push([at, ctx.strokeStyle]),
  };
  const chart = { ctx, bbox: { top: 0, height: 9 }, scales: { x: { min: 0, max: 100 } }, valToPos: (at) => at };
  const marks = [10, 10.2, 10.3, 40].map((time, step) => ({ kind: "fault", time, step, text: "" }));
  drawMarks(chart, marks, { fault: "red" });
  assert.deepEqual(lines, [[10, "red"], [40, "red"]]);
});

test("shows no value of a neighbor in the legend where a value is missing", () => {
  const chart = { data: [[1, 2, 3, 4, 5], [2.1, 1.9, null, null, undefined]] };
  assert.deepEqual([0, 1, 2, 3, 4].map((index) => nearestKnown(chart, 1, index)), [0, 1, 2, 3, 3]);
});

test("takes the range of a run that sent only gauges from the gauges", () => {
  const at = 1.7e9;
  const gauges = [
    { kind: "gauge", rank: 0, time: at, resident_bytes: 5 },
    { kind: "gauge", rank: -1, time: at + 4, cpu: 0.5 },
  ];
  const step = { kind: "step", rank: 0, step: 1, steps: 9, time: at + 2, step_s: 1, tokens: 8, cells: [] };
  const extents = (items) => {
    const state = createState();
    for (const item of items) foldBatch(state, `${item.time}-0`, batch(item.time, item));
    state.whole = { length: 0 }; // as after a history without traffic
    const live = getExtent(state);
    state.time = null;
    return [live, getExtent(state)];
  };
  assert.deepEqual(extents([]), [null, null]);
  assert.deepEqual(extents(gauges), [[at, at + 4], [at, at + 4]]);
  assert.deepEqual(extents([gauges[0], step, gauges[1]]), [[at + 2, at + 4], [at + 2, at + 4]]);
});

test("draws memory of the ranks that use most and counts the others", () => {
  const state = createState();
  const fold = (item) => foldGauge(state, { kind: "gauge", ...item }, 0);
  for (let rank = 0; rank < 64; rank += 1) {
    for (const time of [1, 2]) fold({ rank, time, resident_bytes: 100 + rank });
  }
  fold({ rank: 5, time: 4, resident_bytes: 900 });
  const memory = memoryLines("resident_bytes", state.gauges, null, [0, 20]);
  const ranks = [5, ...Array.from({ length: 15 }, (_, i) => 49 + i)];
  assert.deepEqual(memory.lines.map((line) => line.label), ranks.map((rank) => `rank ${rank}`));
  assert.equal(memory.left, 48);
  const cpu = gaugeLines({ of: "ranks", fields: { resident_bytes: "in use" } }, state.gauges, new Map());
  assert.deepEqual([cpu.lines.length, cpu.left], [16, 48]);
});

test("draws planned memory over the whole range", () => {
  const state = createState();
  const items = [
    { rank: 0, time: 1, resident_bytes: 100 },
    { rank: 1, time: 2, resident_bytes: 200 },
    { rank: -1, time: 2, cpu: 1.5, resident_bytes: 9999 },
    { rank: 0, time: 3, resident_bytes: 120 },
  ];
  for (const item of items) foldGauge(state, { kind: "gauge", ...item }, 0);
  assert.deepEqual(memoryFields(state.gauges), ["resident_bytes"]);
  const { lines, columns } = memoryLines("resident_bytes", state.gauges, 500, [0, 20]);
  assert.deepEqual(lines.map((line) => line.label), ["rank 0", "rank 1", "plan"]);
  assert.deepEqual(columns[0], [0, 1, 2, 3, 20]);
  assert.deepEqual(Array.from(columns[3], (value) => value ?? null), [500, null, null, null, 500]);
  assert.deepEqual([...state.gauges.keys()], [0, 1, -1]);
});
