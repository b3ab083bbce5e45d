import "./support/browser.js";

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { compareAxes } from "../../webapp/static/js/collectives.js";
import { fitWords } from "../../webapp/static/js/job/dryrun.js";
import { getSpeed } from "../../webapp/static/js/job/figures.js";
import { endingWords } from "../../webapp/static/js/job/ending.js";
import { getVerdict } from "../../webapp/static/js/job/health.js";
import { neverDid } from "../../webapp/static/js/job/nothing.js";
import { bars, diagnosedSteps, measuredParts, partRows, getSteps } from "../../webapp/static/js/job/parts.js";
import { findPlaces } from "../../webapp/static/js/job/places.js";
import { plannedLines } from "../../webapp/static/js/job/planned.js";
import { startParts, startPhase } from "../../webapp/static/js/job/start.js";
import { getStepTime, stepTimeWords } from "../../webapp/static/js/job/steptime.js";
import { createState, foldBatch, foldSummary } from "../../webapp/static/js/store.js";
import { assertClose } from "./support/assertions.js";
import { batch, foldBatches } from "./support/telemetry.js";

const GIB = 2 ** 30;
const part = (name, kind, seconds, waiting_s = 0) => ({ name, kind, seconds, waiting_s });
const STEP = {
  step_s: 0.2,
  sure: 0,
  steps: 10,
  parts: [
    part("compute", "compute", 0.08),
    part("tp", "exposed", 0.05, 0.02),
    part("dp", "hidden", 0.04),
    part("bubble", "bubble", 0.06),
    part("data", "data", 0.01),
  ],
};

test("scales the bars of two steps by the longer step", () => {
  const planned = { ...STEP, step_s: 0.1, parts: [part("compute", "compute", 0.1)] };
  const [above, below] = bars(planned, STEP);
  const shares = (parts) => Object.fromEntries(parts.map(({ name, share }) => [name, share]));
  assertClose(shares(above.shown), { compute: 50 });
  assertClose(shares(below.shown), { compute: 40, tp: 25, bubble: 30, data: 5 });
  assertClose(below.shown[1].waiting, 10);
  assertClose(shares(below.hidden), { dp: 20 });
  assert.deepEqual([above.rest, below.rest], [0, 0]);
  const [, partly] = bars(null, { ...STEP, parts: STEP.parts.slice(0, 1) });
  assertClose(partly.rest, 60); // the remainder is not broken down
});

test("breaks a step down into parts that add up to the step", () => {
  const step = { kind: "step", time: 1, step: 4, ran: 4, steps: 9, step_s: 0.2, tokens: 64, loss: 2, cells: [] };
  const parts = [
    { data: 0.01, optimizer: 0.02, exposed: { tp: 0.06 }, hidden: { dp: 0.03 } },
    { data: 0.03, optimizer: 0.02, exposed: { dp: 0.02 }, hidden: {} },
  ];
  const items = parts.map((own, rank) => ({ ...step, grad_norm: 1, learning_rate: 0.1, rank, parts: own }));
  const found = measuredParts(foldBatches([batch(1, ...items)]).ranks).parts;
  assertClose(Object.fromEntries(found.map(({ name, kind, seconds }) => [`${name} ${kind}`, seconds])), {
    "data data": 0.02,
    "optimizer optimizer": 0.02,
    "tp exposed": 0.03,
    "dp exposed": 0.01,
    "compute compute": 0.12,
    "dp hidden": 0.015,
  });
  assertClose(found.filter(({ kind }) => kind !== "hidden").reduce((sum, { seconds }) => sum + seconds, 0), 0.2);
});

test("shows the breakdown of the diagnosis", () => {
  const diagnosis = { planned: STEP, measured: { ...STEP, step_s: 0.3 } };
  const { planned, measured } = diagnosedSteps({ diagnosis, estimate: {} });
  assert.deepEqual([planned.step_s, measured.step_s], [0.2, 0.3]);
  assert.deepEqual(diagnosedSteps({ diagnosis: {}, estimate: {} }), { planned: null, measured: null });
});

test("shows both figures of a part that matters in the plan or in the run", () => {
  const sides = [
    { step_s: 1, parts: [part("optimizer", "optimizer", 4e-4), part("data", "data", 1e-4), part("compute", "compute", 0.9)] },
    { step_s: 4, parts: [part("optimizer", "optimizer", 0.9), part("data", "data", 1e-4), part("compute", "compute", 3)] },
  ];
  const rows = partRows(...sides).map((row) => [row.name, row.planned, row.measured]);
  assert.deepEqual(rows, [["compute", 0.9, 3], ["optimizer", 4e-4, 0.9]]);
});

const QUEUED_AT = Date.parse("2026-01-01T00:00:00Z") / 1000;
const at = (seconds) => new Date(1000 * (QUEUED_AT + seconds)).toISOString();

test("breaks a start down into stages with the last rank of each", () => {
  const history = [
    { status: "queued", attempt: 1, at: "2025-01-01T00:00:00Z" },
    { status: "queued", attempt: 2, at: at(0) },
    { status: "starting", attempt: 2, at: at(2) },
  ];
  const began = QUEUED_AT + 2;
  const starts = new Map([
    [0, { imported: began + 3, met: began + 9 }],
    [1, { imported: began + 7, met: began + 8 }],
    [-1, { spawned: began + 1 }],
  ]);
  const parts = startParts(history, 2, starts).map(({ name, seconds, rank }) => [name, seconds, rank]);
  assert.deepEqual(parts, [["queue", 2, -1], ["spawn", 1, -1], ["import", 6, 1], ["rendezvous", 2, 0]]);
  assert.deepEqual(startParts(history.slice(0, 2), 2, starts), []);
  assert.deepEqual(startParts(history, 2, new Map()).map(({ name }) => name), ["queue"]);
});

test("shows the phase of a start with its seconds", () => {
  const history = [{ status: "queued", attempt: 1, at: at(0) }, { status: "starting", attempt: 1, at: at(10) }];
  const job = { status: "starting", attempt: 1, history, members: [{}], world_size: 2, spec: {} };
  const phase = (starts, changes = {}, known = {}) => {
    const state = { starts: new Map(starts), progress: null, ranks: new Map(), ...known };
    return startPhase({ ...job, ...changes }, state, QUEUED_AT + 60);
  };
  const host = [-1, { claimed: QUEUED_AT + 11, spawned: QUEUED_AT + 12 }];
  const first = [0, { imported: QUEUED_AT + 30 }];
  const second = [1, { imported: QUEUED_AT + 40 }];
  const all = [host, first, second];
  assert.equal(phase([]), "Waiting for the host, 50 s");
  assert.equal(phase([host]), "Importing PyTorch, 48 s");
  assert.equal(phase([host, first]), "Importing PyTorch, 48 s");
  assert.equal(phase(all), "Connecting ranks (rendezvous), 20 s");
  assert.equal(phase([first, second]), "Connecting ranks (rendezvous), 20 s");
  assert.equal(phase(all, { spec: { kind: "script" } }), "");
  assert.equal(phase([], { history: [] }), "");
  assert.equal(phase(all, {}, { progress: { step: 1 } }), "");
  assert.equal(phase(all, { status: "failed" }), "");
});

test("shows the median of the last step times with its spread", () => {
  const stepTime = (stepTimes, ran, measured = null, curve = []) => {
    const state = { stepTimes, ranks: new Map([[0, { exactStep: ran }]]), steps: new Map(curve) };
    return getStepTime({ finished: measured !== null, exit: { summary: { measured } } }, state);
  };
  const step = stepTime([9, 9, 9, 0.12, 0.125, 0.13, 0.135, 0.14], 8); // three steps of warm-up
  assert.deepEqual([step.step_s, step.steps], [0.13, 5]);
  assert.equal(stepTimeWords(step), "median of 5 steps, 122 to 138 ms");
  assert.equal(stepTimeWords(stepTime(Array(50).fill(0.1), 60)), "median of 50 steps, 100 to 100 ms");
  assert.equal(stepTimeWords(stepTime([0.5], 1)), "one step");
  assert.equal(stepTime([], 0), null);
  const curve = Array.from({ length: 200 }, (_, i) => [i + 1, { step_s: i >= 100 ? 0.2 : 9 }]);
  const ended = stepTime(Array(50).fill(0.1), 200, { step_s: 0.21, steps: 100 }, curve);
  assert.equal(ended.step_s, 0.21); // as REST returns it
  assert.equal(stepTimeWords(ended), "median of 100 steps, 200 to 200 ms");
});

const MEMBERS = [
  { node: 0, host: "anna", first_rank: 0, num_ranks: 2 },
  { node: 1, host: "bert", first_rank: 2, num_ranks: 2 },
];
const JOB = { status: "running", finished: false, exit: null, members: MEMBERS, world_size: 4, diagnosis: null };

test("shows every rank on its host with its activity", () => {
  const state = createState();
  state.ranks.set(0, { phase: "step" }).set(1, { phase: "step" }).set(2, { phase: "checkpoint" });
  state.standing.set(1, { still: 12 });
  state.processes.set(2, { state: "stopped" });
  const places = (changes) =>
    findPlaces({ ...JOB, ...changes }, state).map(({ host, ranks }) => {
      const blamed = ranks.filter((one) => one.blamed).map((one) => one.rank);
      return [host, ranks.map((one) => one.does), blamed];
    });
  assert.deepEqual(places({}), [["anna", ["training", "stalled"], []], ["bert", ["stopped", "starting"], []]]);
  const hang = { ranks: [2], text: "it never entered all-reduce 17 of dp" };
  assert.deepEqual(places({ diagnosis: { hang, stragglers: [] } })[1], ["bert", ["stopped", "starting"], [2]]);
  assert.deepEqual(places({ status: "failed", finished: true, exit: { rank: 3 } }), [
    ["anna", ["ended", "ended"], []],
    ["bert", ["ended", "failed"], []],
  ]);
  const queued = places({ status: "queued", members: [] });
  assert.deepEqual(queued.map(([host, ranks]) => [host, ranks.length]), [[null, 4]]);
  const members = [{ ...MEMBERS[0], silent: true }, { ...MEMBERS[1], ended: "x", outcome: "lost" }];
  assert.deepEqual(places({ status: "unreachable", members }), [
    ["anna", ["no contact", "no contact"], []],
    ["bert", ["ended", "ended"], []],
  ]);
});

test("explains a missing verdict", () => {
  const diagnosis = { sentence: "As planned.", state: "well", reason: "", next: "", evidence: [] };
  const sentence = (changes) => getVerdict({ ...JOB, ...changes }).sentence;
  assert.equal(sentence({}), "Not checked: no step has finished yet.");
  assert.equal(sentence({ status: "queued" }), "Not checked: the job has not started.");
  assert.equal(sentence({ finished: true, status: "succeeded" }), "Not checked: the run ended before its first step.");
  assert.equal(sentence({ diagnosis }), "As planned.");
  const verdict = (changes) => {
    const { state, sentence: words } = getVerdict({ ...JOB, finished: true, ...changes });
    return [state, words];
  };
  const exit = { reason: "boom", rank: 1 };
  const stale = verdict({ status: "failed", exit, diagnosis: { ...diagnosis, over: false } });
  assert.deepEqual(stale, ["failed", "Failed: boom (rank 1)."]);
  const cancelled = verdict({ status: "cancelled", diagnosis: { ...diagnosis, over: true } });
  assert.deepEqual(cancelled, ["", "As planned."]);
});

test("does not repeat the rank and the signal of the reason", () => {
  const words = (exit) => endingWords({ status: "failed", exit, history: [] });
  assert.equal(words({ reason: "rank 1 was killed by SIGABRT", rank: 1, signal: "SIGABRT" }), "Failed: rank 1 was killed by SIGABRT");
  assert.equal(words({ reason: "boom on rank 11", rank: 1, exit_code: 3 }), "Failed: boom on rank 11 (rank 1, exit code 3)");
});

test("calls a run that ended while it started neither starting nor healthy", () => {
  const diagnosis = { sentence: "Nothing was measured", state: "starting", reason: "", next: "", evidence: [] };
  const states = [false, true].map((over) => getVerdict({ ...JOB, diagnosis: { ...diagnosis, over } }).state);
  assert.deepEqual(states, ["starting", ""]);
});

test("finds out what an ended run never did", () => {
  const changes = (attempt, ...statuses) => statuses.map((status) => ({ status, attempt }));
  const placed = changes(1, "queued", "starting", "failed");
  const counted = { phase: "setup", op: "all_reduce", axis: "dp", group_size: 2, count: 1, completed: 1, busy_s: 0.1 };
  const cells = [{ ...counted, payload_bytes: 8, algorithmic_bytes: 8 }];
  const traffic = { kind: "traffic", rank: 0, time: 1, dropped: 0, cells };
  const line = { kind: "log", rank: 0, time: 1, first: 1, lines: ["no module named train"], stream: "stderr" };
  const hostGauge = { kind: "gauge", rank: -1, time: 1, cpu: 0.5 };
  const rankGauge = { kind: "gauge", rank: 0, time: 1, resident_bytes: 5 };
  const cases = [
    ["cancelled", changes(1, "queued", "cancelling", "cancelled"), [], null, "ran"],
    ["cancelled", [...placed, ...changes(2, "queued", "cancelled")], [], null, "ran"],
    ["failed", placed, [], false, "measured"],
    ["lost", placed, [], false, "measured"],
    ["failed", changes(1, "queued", "starting", "running", "failed"), [line, hostGauge], true, "measured"],
    ["failed", placed, [], null, ""], // the history is unknown
    ["failed", placed, [traffic], true, ""],
    ["failed", placed, [rankGauge], true, "sent"],
    ["succeeded", placed, [], false, ""],
    ["succeeded", placed, [rankGauge], true, "sent"], // a script without a collective
    ["running", changes(1, "queued", "starting", "running"), [], false, ""],
    ["queued", changes(1, "queued"), [], null, "queued"],
  ];
  for (const [status, history, items, isRecorded, expected] of cases) {
    const finished = !["running", "queued"].includes(status);
    const job = { status, finished, history, attempt: history.at(-1).attempt };
    assert.equal(neverDid(job, foldBatches([batch(1, ...items)]), isRecorded), expected);
  }
});

const constants = readFileSync(new URL("../../contracts/telemetry/items.py", import.meta.url), "utf8");
const SPEED_STEPS = Number(/^SPEED_STEPS: Final = (\d+)/m.exec(constants)[1]);
const TOKENS = 64;

/** Return the speed that a page shows after steps of these seconds, which rank 1 reports first with a slower clock. */
function speed(seconds, summary = null) {
  const state = createState();
  const step = { kind: "step", time: 1, steps: 99, tokens: TOKENS, loss: 2, cells: [], grad_norm: 1, parts: null };
  seconds.forEach((step_s, i) => {
    for (const rank of [1, 0]) {
      const item = { ...step, learning_rate: 0.1, step: i + 1, ran: i + 1, rank, step_s: step_s * (1 + rank) };
      foldBatch(state, `${2 * i + 1 - rank}-0`, batch(1, item));
    }
  });
  if (summary) foldSummary(state, summary);
  return getSpeed({ finished: summary !== null, exit: { summary }, estimate: { tokens_per_step: TOKENS } }, state);
}

const TIMES = [0.01, ...Array.from({ length: SPEED_STEPS + 4 }, (_, i) => 0.1 + 0.01 * (i % 3)), 0.5];

test("computes the speed as tokens over time of the last steps", () => {
  const seconds = TIMES.slice(-SPEED_STEPS).reduce((sum, value) => sum + value, 0);
  const rate = ((TOKENS * SPEED_STEPS) / seconds).toFixed(0);
  assert.deepEqual(speed(TIMES), { rate: `${rate} tokens/s`, note: `mean of ${SPEED_STEPS} steps` });
  assert.deepEqual(speed([0.5]), { rate: "128 tokens/s", note: "one step" });
});

test("shows the speed of the summary after the end", () => {
  const summary = { steps: 26, tokens_per_s: 3588.1, losses: [], eval_losses: [], cells: {}, verdict: {} };
  const expected = { rate: "3.59k tokens/s", note: `mean of ${SPEED_STEPS} steps` };
  assert.deepEqual(speed(TIMES, summary), expected);
  assert.deepEqual(speed([], summary), expected);
  assert.equal(speed([], { ...summary, ran_steps: 3 }).note, "mean of 3 steps");
  assert.deepEqual(speed([], { ...summary, tokens_per_s: null }), { rate: "–", note: "" });
});

/** Return the lines of plan and measurement of a rank with `tensorBytes` in tensors. */
function compareSmallRun(tensorBytes, device, measured = null) {
  const state = createState();
  state.peaks.set(0, 2 ** 29);
  state.stepTimes = [0.5, 0.04, 0.04];
  const memory = { parameters: tensorBytes, allowance: 400 * 2 ** 20 };
  const estimate = {
    stages: [{ memory, memory_bytes: tensorBytes + 400 * 2 ** 20 }],
    cluster: { reserved_bytes: 310 * 2 ** 20 },
    time: { step_s: 0.02, parts: [] },
  };
  return plannedLines(estimate, state, [], { device, measured, apart: { planned: null, measured: null }, least: 2 ** 28 });
}

test("compares no memory of a small rank with the overhead of libraries", () => {
  const difference = (...run) => compareSmallRun(...run).find((line) => line.group.includes("memory")).off;
  assert.equal(difference(2 ** 28 - 1, "cpu"), "not compared");
  assert.match(difference(2 ** 28, "cpu"), /%$/);
  assert.match(difference(2 ** 20, "cuda"), /%$/);
  const groups = compareSmallRun(2 ** 20, "cpu").map((line) => line.group);
  assert.ok(groups.includes("memory of the rank with the most memory, without 310 MiB of process overhead"));
});

test("shows the step time of the summary after the end", () => {
  const stepTime = (summary) => compareSmallRun(1, "cpu", summary).find((line) => line.group === "step time").measured;
  assert.equal(stepTime(null), "40.0 ms");
  assert.equal(stepTime({ steps: 9, step_s: 0.03 }), "30.0 ms");
});

const STAGES = [{ stage: 0, memory: {}, memory_bytes: 0 }];

test("divides bytes by the steps of each rank", () => {
  const state = createState();
  const cells = (steps) => [{ axis: "dp", op: "all_reduce", payload_bytes: 100 * steps, count: steps }];
  for (const [rank, steps] of [[0, 3], [1, 2]]) state.ranks.set(rank, { exactStep: steps, exactCells: cells(steps) });
  const rows = compareAxes(state.ranks, () => ({ dp: { bytes: 100, calls: 1 } }));
  const estimate = { axes: { pp: 1, dp: 2, tp: 1 }, stages: STAGES };
  const lines = plannedLines(estimate, state, rows, { device: "cpu", least: 0 });
  const traffic = lines.filter((line) => line.group.startsWith("traffic"));
  assert.deepEqual(traffic.map((line) => [line.planned, line.measured, line.off]), [["200 B", "200 B", "0%"]]);
});

test("takes the mean of the middle two of an even number of steps", () => {
  const state = createState();
  state.stepTimes.push(0.5, 0.7, 0.1, 0.9);
  const estimate = { time: { step_s: 0.6, parts: [] }, axes: { pp: 1, dp: 1, tp: 1 }, stages: STAGES };
  const run = { device: "cpu", least: 0, measured: null, apart: { planned: null, measured: null } };
  const lines = plannedLines(estimate, state, [], run);
  assert.equal(lines.find((line) => line.group === "step time").measured, "600 ms");
});

test("compares each part of a step with the plan", () => {
  const parts = [["compute", 0.015], ["launch", 0.005], ["tp", 0.02], ["dp", 0.01]];
  const time = { step_s: 0.05, parts: parts.map(([name, seconds]) => ({ name, seconds })) };
  const measured = [part("compute", "compute", 0.04), part("tp", "exposed", 0.05), part("tp", "hidden", 0.01)];
  const job = {
    estimate: { stages: STAGES, time },
    diagnosis: { measured: { step_s: 0.09, sure: 0, steps: 9, parts: measured } },
  };
  const state = createState();
  const run = { device: "cpu", measured: null, apart: getSteps(job, state), least: 0 };
  const lines = plannedLines(job.estimate, state, [], run).filter(({ group }) => group === "step time");
  assert.deepEqual(lines.map((line) => [line.name, line.planned, line.measured, line.off]), [
    ["total", "50.0 ms", null, null],
    ["compute", "20.0 ms", "40.0 ms", "+100%"],
    ["dp, exposed", "10.0 ms", "under 0.1%", null],
    ["tp, exposed", "20.0 ms", "50.0 ms", "+150%"],
    ["tp, overlapped", null, "10.0 ms", null],
  ]);
});

/** Return the text and the tone for ranks with these GiB of tensors on devices of 80 GiB. */
function dryRunFit(counted, changes = {}) {
  const stages = [60, 120].map((gib, stage) => ({ stage, memory: { allowance: GIB }, memory_bytes: gib * GIB }));
  const estimate = { stages, axes: { pp: 2, dp: 1, tp: 1 }, cluster: { memory_bytes: 80 * GIB } };
  const job = { spec: { dry_ranks: [0, 1] }, estimate, finished: false, status: "running", ...changes };
  const ranks = counted.map((gib, rank) => [rank, { peak_bytes: gib * GIB, optimizer_bytes: GIB }]);
  return fitWords(job, new Map(ranks));
}

test("states first whether the layout of a dry run fits", () => {
  assert.deepEqual(dryRunFit([]), { text: "Counting rank 0.", tone: "" });
  assert.deepEqual(dryRunFit([3]), {
    text:
      "Does not fit: 120 GiB of 80.0 GiB on the rank with the most memory, stage 1 (planned, not counted). " +
      "Counted 1 of 2 ranks.",
    tone: "bad",
  });
  const overhead = "This memory includes 1.00 GiB of planned overhead.";
  assert.deepEqual(dryRunFit([3, 8]), {
    text: `Fits: 10.0 GiB of 80.0 GiB on the rank with the most memory, rank 1. ${overhead}`,
    tone: "good",
  });
  assert.deepEqual(dryRunFit([90, 8]), {
    text: `Does not fit: 92.0 GiB of 80.0 GiB on the rank with the most memory, rank 0. ${overhead}`,
    tone: "bad",
  });
});

test("states no fit of a dry run that failed", () => {
  const { text } = dryRunFit([], { finished: true, status: "failed" });
  assert.equal(text, "The dry run ended before it finished a rank.");
});
