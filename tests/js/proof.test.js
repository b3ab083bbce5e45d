import "./support/browser.js";

import assert from "node:assert/strict";
import test from "node:test";

import { processProof, replicaProof, trafficProof } from "../../webapp/static/js/job/proof.js";

const FIGURES = { tensors: 60, update: 2e-4, loss: 2e-7, norm: 7e-7, seconds: 0.3, gradient: 6e-7, limit: 1e-5 };
const MATCH = "gradients, updates, and norms match the reference within 2e-4";
const PART = `${MATCH}; the final step was not compared`;

test("states the worst of the differences from the reference", () => {
  const cases = [
    [{}, MATCH],
    [{ gradient: 0.059 }, "gradients, updates, and norms match the reference within 0.059"],
    [{ update: 0.3 }, "gradients, updates, and norms match the reference within 0.3"],
    [{ norm: 0.04 }, "gradients, updates, and norms match the reference within 0.04"],
  ];
  for (const [differences, words] of cases) {
    const check = { ...FIGURES, state: "equal", why: "the loss ran away", steps: 1, ...differences };
    const proof = processProof({ one_process: check }, true);
    assert.deepEqual([proof.tone, proof.words], ["good", words]);
    assert.ok(proof.more.endsWith("The check took 300 ms.\nthe loss ran away"));
  }
});

test("adds the final check to the first check", () => {
  const final = "Final check (one extra step";
  const cases = [
    ["due", false, "good", MATCH, "A final check runs when the job ends."],
    ["due", true, "", PART, "The run ended before the final check."],
    ["equal", true, "good", MATCH, final],
    ["apart", true, "bad", "differs from the reference in the final check", final],
    ["not checked", true, "", PART, "No final check: nan"],
  ];
  for (const [state, isFinished, tone, words, more] of cases) {
    const first = { ...FIGURES, state: "equal", why: "", steps: 3 };
    const end = { ...FIGURES, state, why: "nan", steps: 1 };
    const proof = processProof({ one_process: first, end }, isFinished);
    assert.deepEqual([proof.tone, proof.words], [tone, words]);
    const lines = proof.more.split("\n");
    assert.ok(lines[1].startsWith(more), lines[1]);
    if (more === final) assert.equal(lines[2], "nan"); // the limits and the step that exceeded them
  }
});

test("uses the final check if no step was left for the first check", () => {
  const cases = [
    ["due", "", "not checked"],
    ["equal", "good", MATCH],
    ["apart", "bad", "differs from the reference in the final check"],
  ];
  for (const [state, tone, words] of cases) {
    const first = { ...FIGURES, state: "not checked", why: "no step was left to train", steps: 4 };
    const end = { ...FIGURES, state, why: "", steps: 1 };
    const proof = processProof({ one_process: first, end }, true);
    assert.deepEqual([proof.tone, proof.words], [tone, words]);
    assert.ok(proof.more.startsWith("no step was left to train\n"));
  }
});

test("reports expert choices that differ from the reference", () => {
  const differs = (tokens) =>
    `summed over layers. The router of the reference prefers another expert for ${tokens}, ` +
    "by at most 4e-3 of the spread of expert log-probabilities.";
  const same = "for 9,216 tokens, summed over layers. The router of the reference chooses the same experts as the run.";
  for (const [turned, words] of [[0, same], [1, differs("1 token")], [44, differs("44 tokens")]]) {
    const choices = { tokens: 9216, turned, gap: turned ? 0.004 : 0 };
    const check = { ...FIGURES, state: "equal", why: "bf16 allows ...", steps: 3, gradient: 0.02, limit: 0.1, choices };
    assert.ok(processProof({ one_process: check }, true).more.endsWith(`${words}\nbf16 allows ...`));
  }
});

test("reports ranks that trained on other data", () => {
  const rows = { what: "rows", name: "step 1", axis: "dp", ranks: [3], apart: 1, limit: 0 };
  const proof = replicaProof({ replicas: { steps: [1], parts: 60, copied: 60, apart: 0 }, wrong: [rows] });
  assert.deepEqual([proof.tone, proof.words], ["bad", "1 rank trained on other data"]);
});

const ROW = { phase: "step", op: "all_reduce", axis: "dp", predicted_bytes: 8, measured_bytes: 8 };
const prove = (rows, worldSize) => {
  const verdicts = new Map(rows.map((row, rank) => [rank, [row]]));
  return trafficProof({ verdicts }, null, true, true, worldSize);
};

test("states that no traffic was expected and none was measured", () => {
  const nothing = { predicted_bytes: 0, measured_bytes: 0, predicted_count: 0, measured_count: 0 };
  const total = "Total traffic difference over all phases of 1 rank";
  assert.equal(prove([nothing], 1).more, `${total} (no traffic expected, none measured).`);
  assert.equal(prove([{ ...nothing, predicted_count: 1, measured_count: 1 }], 1).more, `${total}.`);
});

test("gives no verdict before all ranks sent theirs", () => {
  const row = { ...ROW, predicted_count: 1, measured_count: 1 };
  const check = (count) => {
    const { tone, words, more } = prove(Array(count).fill(row), 8);
    return [tone, words, more];
  };
  const total = "Total traffic difference over all phases of";
  assert.deepEqual(check(2), ["", "0 B, 0 calls", `${total} 2 of 8 ranks.`]);
  assert.deepEqual(check(8), ["good", "0 B, 0 calls", `${total} 8 ranks.`]);
});
