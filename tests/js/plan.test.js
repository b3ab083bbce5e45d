import assert from "node:assert/strict";
import test from "node:test";

import { query, why } from "../../webapp/static/js/plan/best.js";
import { describeLayout, whole } from "../../webapp/static/js/plan/file_import.js";
import { formatCluster, parseCluster } from "../../webapp/static/js/plan/own_accelerator.js";
import { listMeasuredSteps, readSeconds } from "../../webapp/static/js/plan/measured_steps.js";
import { withParts } from "../../webapp/static/js/plan/hidden_parts.js";
import { within } from "../../webapp/static/js/pictures/time.js";
import { failed, fetchPatiently, words } from "../../webapp/static/js/refusal.js";

test("searches only runnable layouts if Meshboard can run the software", () => {
  const cases = [[null, true], ["ours", true], ["megatron", false]];
  for (const [stack, runnable] of cases) {
    const resources = stack ? { stack } : {};
    const found = query({ layout: { dp: 4 }, train: { micro_batches: 2 }, resources }, "");
    assert.deepEqual([found.runnable, found.ranks, found.spec.resources], [runnable, 4, resources]);
  }
});

test("compares the best layout with a faster layout in the form", () => {
  const found = { best: [{ step_s: 0.1 }], fitting: 1, considered: 2, complete: true, neighbours: [] };
  const start = "Predicted step time 100 ms. Fastest of 1 layouts that fit (2 searched).";
  assert.equal(why(found, 0.2), `${start} This layout is 2.00 times as fast as the layout in the form.`);
  assert.equal(why(found, 0.1), `${start} This layout is as fast as the layout in the form.`);
  assert.equal(why(found, 0.05), `${start} The layout in the form is 2.00 times as fast as this layout.`);
  assert.equal(why(found, null), start);
  const stopped = why({ ...found, complete: false, total: 9000 }, null);
  assert.equal(stopped, "Predicted step time 100 ms. Fastest of 1 layouts that fit (2 of 9,000 searched).");
});

test("names the parts that a form keeps from the copied model", () => {
  const start = ", and kept from the copied model:";
  const cases = [
    [{ moe: '{"num_experts": 1024}' }, `${start} a mixture of 1,024 experts`],
    [{ moe: "{}", mla: "{}" }, `${start} a mixture of experts, latent attention`],
    [{ rope_scaling: '{"factor": 8}' }, `${start} RoPE scaling by 8`],
    [{ moe: "{broken", mla: "null", rope_scaling: "7" }, ""],
  ];
  for (const [parts, expected] of cases) assert.equal(withParts((part) => parts[part] ?? ""), expected);
});

test("writes and reads the numbers of an own accelerator", () => {
  const pairs = [["memory_gb", "80"], ["bf16_tflops", " 989.4 "], ["node_gb_s", ""], ["name", "My chip"]];
  const cluster = "own:memory_gb=80,bf16_tflops=989.4,name=My chip";
  assert.equal(formatCluster(pairs), cluster);
  assert.deepEqual(parseCluster(cluster), [["memory_gb", "80"], ["bf16_tflops", "989.4"], ["name", "My chip"]]);
  assert.equal(formatCluster([["memory_gb", "1,000"]]), "own:memory_gb=1 000");
});

test("shows the range of a predicted step time", () => {
  assert.equal(within({ step_s: 0.1, interval: { share: 0.5 } }), "50.0 ms to 150 ms");
  assert.equal(within({ step_s: 0.1, interval: { share: 4 } }), "20.0 ms to 500 ms");
});

test("repeats a request after the time that a busy server names", async (context) => {
  const busy = [503, "5"];
  const cases = [
    [[[200]], 200, []],
    [[busy, [503, "2"], [200]], 200, [5000, 2000]],
    [[[503], [200]], 503, []], // the server names no time
    [[[429, "5"], [200]], 429, []], // the user sent too many requests
    [[busy, busy, busy, busy, [200]], 503, [5000, 5000, 5000]],
  ];
  for (const [answers, status, expected] of cases) {
    const responses = answers.map(([code, after]) => {
      const headers = after ? { "Retry-After": after } : {};
      return new Response("", { status: code, headers });
    });
    const waits = [];
    context.mock.method(globalThis, "fetch", async () => responses.shift());
    context.mock.method(globalThis, "setTimeout", (done, ms) => {
      waits.push(ms);
      done();
    });
    const response = await fetchPatiently("/plan/");
    context.mock.restoreAll();
    assert.deepEqual([response.status, waits], [status, expected]);
  }
});

test("names each refused field once and ends with one period", () => {
  const errors = [
    { field: "layout.tp", message: "`layout.tp` is 3. Use 1, 2 or 4." },
    { field: "train.steps", message: "Use at least 1." },
    { field: "request", message: "Try again." },
  ];
  const expected = "No estimate: `layout.tp` is 3. Use 1, 2 or 4. train.steps: Use at least 1. Try again.";
  assert.equal(failed("No estimate", words(errors)), expected);
});

test("lists notes, defaults, and unknown settings of an imported layout", () => {
  const found = { notes: ["A note."], assumed: ["`tp` is 1."], not_understood: ["a.b", "c"] };
  assert.deepEqual(describeLayout(found), ["A note.", "`tp` is 1.", "Not understood: `a.b`, `c`."]);
  assert.deepEqual(describeLayout({ notes: [], assumed: [], not_understood: [] }), []);
});

test("sends the number of ranks of a layout, or the text that the server refuses", () => {
  assert.deepEqual(["", " 64 ", "many", "1e3"].map(whole), [null, 64, "many", "1e3"]);
});

test("measured steps of lanes keep the batch for which they were entered", () => {
  const measured = { step_s: readSeconds(" 1.35 "), global_batch: 64, seq_len: 4096 };
  const lanes = [
    { layout: { dp: 8 }, micro_batches: 2, measured, plan: {} },
    { layout: { tp: 8 }, micro_batches: 1, measured: null, plan: {} },
  ];
  assert.deepEqual(listMeasuredSteps(lanes), [{ layout: { dp: 8 }, micro_batches: 2, step_s: 1.35, global_batch: 64, seq_len: 4096 }]);
  assert.equal(readSeconds("  "), null);
  assert.equal(readSeconds("1,35"), "1,35", "the server names the value in its error");
  assert.equal(readSeconds("Infinity"), "Infinity");
});
