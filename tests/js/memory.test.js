import "./support/browser.js";

import assert from "node:assert/strict";
import test from "node:test";

import { dryLines, memoryLines } from "../../webapp/static/js/job/memory.js";
import { createState } from "../../webapp/static/js/store.js";

const MIB = 2 ** 20;
const COUNTED = { parameters: 100 * MIB, gradients: 100 * MIB, optimizer: 200 * MIB, copies: 0 };
const REST = "other (activations, temporary tensors, buffers)";
const REST_WITH_GRADIENTS = "other (activations, temporary tensors, buffers, gradients)";

/** Return planned, measured, and difference by name. Stage 0 needs most in the plan, and rank 1 needed most. */
function compareMemory(parts, stage = {}) {
  const tensors = { parameters: 100 * MIB, gradients: 100 * MIB, optimizer: 200 * MIB };
  const memory = { ...tensors, activations: 80 * MIB, buffers: 20 * MIB, allowance: 10 * MIB };
  const last = { stage: 1, memory, memory_bytes: 510 * MIB, gradients_bytes: 100 * MIB, ...stage };
  const stages = [{ stage: 0, memory, memory_bytes: 520 * MIB }, last];
  const estimate = { stages, axes: { pp: 2, dp: 1, tp: 1 }, cluster: { reserved_bytes: 10 * MIB } };
  const state = createState();
  state.peaks.set(0, 300 * MIB).set(1, 550 * MIB);
  if (parts) state.memory.set(1, parts);
  const lines = memoryLines(estimate, state, { device: "cuda", least: 0 });
  return Object.fromEntries(lines.map((line) => [line.name, [line.planned, line.measured, line.off]]));
}

test("compares each part of the memory with the plan of its stage", () => {
  const parts = { ...COUNTED, optimizer: 160 * MIB, gradients_then: 100 * MIB, beside: 125 * MIB };
  assert.deepEqual(compareMemory(parts), {
    total: ["500 MiB", "550 MiB", "+10%"],
    "stage 0 (most planned memory)": ["510 MiB", "300 MiB", "−41%"],
    parameters: ["100 MiB", "100 MiB", "0%"],
    "optimizer state": ["200 MiB", "160 MiB", "−20%"],
    gradients: ["100 MiB", "100 MiB", "0%"],
    [REST]: ["100 MiB", "125 MiB", "+25%"],
    "other: activations": ["80.0 MiB", null, null],
    "other: communication buffers": ["20.0 MiB", null, null],
  });
});

test("compares gradients with the rest if they cannot be separated", () => {
  let lines = compareMemory({ ...COUNTED, gradients_then: null, beside: 200 * MIB });
  assert.deepEqual(lines["gradients after backward"], ["100 MiB", "100 MiB", "0%"]);
  assert.deepEqual(lines[REST_WITH_GRADIENTS], ["200 MiB", "200 MiB", "0%"]);
  assert.deepEqual(lines["other: gradients"], ["100 MiB", null, null]);
  lines = compareMemory({ ...COUNTED, gradients_then: 50 * MIB, beside: 150 * MIB });
  assert.deepEqual(lines[REST_WITH_GRADIENTS], ["200 MiB", "200 MiB", "0%"]); // the others may not be allocated yet
  lines = compareMemory({ ...COUNTED, gradients_then: 125 * MIB, beside: null });
  assert.deepEqual(lines["gradients at the peak"], ["100 MiB", "125 MiB", "+25%"]);
  assert.deepEqual(lines[REST], ["100 MiB", null, null]);
});

test("shows no value that an older host or plan did not send", () => {
  const [, other, ...parts] = Object.values(compareMemory(null));
  assert.equal(other[1], "300 MiB");
  for (const [, measured, difference] of parts) assert.deepEqual([measured, difference], [null, null]);
  const lines = compareMemory({ ...COUNTED, gradients_then: 0, beside: 0 }, { gradients_bytes: null });
  assert.deepEqual(lines["gradients after backward"], [null, "100 MiB", null]);
});

test("compares a dry run with tensors only", () => {
  const memory = { parameters: 100 * MIB, gradients: 100 * MIB, optimizer: 200 * MIB, logits: 80 * MIB };
  const stage = { stage: 1, memory: { ...memory, allowance: 30 * MIB }, memory_bytes: 510 * MIB };
  const stages = [{ ...stage, stage: 0, memory_bytes: 1 }, { ...stage, gradients_bytes: 100 * MIB }];
  const estimate = { stages, axes: { pp: 2, dp: 2, tp: 1 } };
  const counted = { rank: 3, peak_bytes: 280 * MIB, optimizer_bytes: 200 * MIB };
  const compare = (item) =>
    dryLines(estimate, item).map((line) => [line.group, line.name, line.planned, line.measured, line.off]);
  const parts = { ...COUNTED, gradients_then: 100 * MIB, beside: 80 * MIB };
  const group = "rank 3, stage 1";
  assert.deepEqual(compare({ ...counted, memory: parts }), [
    [group, "total", "480 MiB", "480 MiB", "0%"],
    [group, "parameters", "100 MiB", "100 MiB", "0%"],
    [group, "optimizer state", "200 MiB", "200 MiB", "0%"],
    [group, "gradients", "100 MiB", "100 MiB", "0%"],
    [group, REST, "80.0 MiB", "80.0 MiB", "0%"],
    [group, "other: logits", "80.0 MiB", null, null],
  ]);
  const [total, ...others] = compare(counted); // an older host counts no parts
  assert.deepEqual(total.slice(3), ["480 MiB", "0%"]);
  for (const line of others) assert.deepEqual(line.slice(3), [null, null]);
});
