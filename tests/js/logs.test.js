import assert from "node:assert/strict";
import test from "node:test";

import { plain, segments } from "../../webapp/static/js/logs/ansi.js";
import { View, foldLog } from "../../webapp/static/js/logs/lines.js";
import { lastLines } from "../../webapp/static/js/job/health.js";
import { findCause, findErrorLine, findTraceback } from "../../webapp/static/js/logs/rootcause.js";

test("removes escape sequences", () => {
  const text = "\x1b[32mgreen\x1b[0m \x1b]0;title\x07\x1b(Bplain\ttab\x00\x08";
  assert.equal(plain(text), "green plain     tab");
});

test("shows characters that reverse the text direction as escapes", () => {
  const text = "deli\u202eaf \u0645\u200f";
  const shown = "deli\\u202eaf \u0645\u200f";
  assert.equal(plain(text), shown);
  assert.equal(segments(`\x1b[31m${text}`).map((one) => one.text).join(""), shown);
});

test("finds the line of an error among the last lines of a log", () => {
  const trace = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "RuntimeError: two", "\tMissing key"];
  const pip = ["Installing", "ERROR: Invalid requirement", "Hint: it looks like a path", "The packages cannot be installed."];
  assert.deepEqual([trace, ["[rank1]: KeyError: 'a'", "done"], pip, ["one", "two"], []].map(findErrorLine), [2, 0, 1, 1, -1]);
});

test("counts only the new lines after an insertion", () => {
  const line = (time) => ({ time, level: "info", text: "" });
  const logs = new Map([[0, { start: 0, lines: [1, 2, 3, 4].map(line) }]]);
  const view = new View(null);
  view.pull(logs);
  logs.set(1, { start: 0, lines: [line(1.5)] });
  const { from, fresh } = view.pull(logs);
  assert.deepEqual([from, fresh], [1, 1]);
});

test("replaces the lines that can still change", () => {
  const logs = new Map();
  const view = new View(null);
  const item = (first, lines, open) => foldLog(logs, { rank: 0, time: first, first, lines, ...(open && { open }) }, 0);
  const shown = () => (view.pull(logs), view.lines.map(({ number, text }) => `${number} ${text}`));
  item(0, ["step 1"], ["bar 10%", "inner 20%"]);
  assert.deepEqual(shown(), ["0 step 1", "1 bar 10%", "2 inner 20%"]);
  item(1, [], ["bar 90%"]);
  assert.deepEqual(shown(), ["0 step 1", "1 bar 90%"]);
  assert.deepEqual(view.pull(logs), { from: 2, dropped: 0, fresh: 0, removed: 0 });
  item(1, ["bar 100%", "step 2"], []);
  assert.deepEqual(view.pull(logs), { from: 1, dropped: 0, fresh: 2, removed: 1 });
  item(0, ["step 1"], ["bar 10%"]); // sent again after a reconnection
  assert.deepEqual(shown(), ["0 step 1", "1 bar 100%", "2 step 2"]);
});

test("shows a progress bar of an older host without a cut state", () => {
  const state = "\rEpoch 1:  17%|#         | 68/400";
  assert.equal(plain(state.repeat(200).slice(0, 4096)), state.slice(1));
  assert.equal(plain(`${state}\r`), state.slice(1));
});

test("ends a traceback at its exception", () => {
  const trace = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()"];
  const error = ["RuntimeError: Error(s) in loading state_dict:", "  size mismatch for a"];
  assert.deepEqual(findTraceback(["step 1", ...trace, ...error, "step 2", "step 3"]).lines, [...trace, ...error]);
  const prefixed = [...trace, ...error].map((line) => `[rank1]: ${line}`);
  assert.deepEqual(findTraceback([...prefixed, "[rank1]: bye"]).lines, prefixed);
  assert.deepEqual(findTraceback(trace).lines, trace);
});

test("shows the evidence of a failure instead of the last lines", () => {
  const evidence = ['  File "train.py", line 5 in <module>', "terminate called after throwing an instance of 'gloo::EnforceNotMet'", "  what():  mismatch"];
  const exit = { outcome: "failed", reason: "rank 1 was killed", rank: 1, log_tail: ["Extension modules: msgpack"], evidence };
  const logs = new Map();
  foldLog(logs, { rank: 1, time: 1, first: 0, lines: [...evidence, "Extension modules: msgpack"] }, 0);
  const job = { status: "failed", exit, members: [], diagnosis: null };
  const state = { ranks: new Map(), logs, places: new Map() };
  assert.deepEqual(findCause(job, state).lines, evidence);
  assert.deepEqual(lastLines(job, { sentence: "Failed: rank 1." }), evidence);
  assert.deepEqual(lastLines({ ...job, exit: { ...exit, evidence: undefined } }, { sentence: "Failed: rank 1." }), exit.log_tail);
});

test("shows the root cause of a failed job, but not of a cancelled job", () => {
  const exit = { outcome: "failed", reason: "rank 0 was killed", rank: null, log_tail: ["boom"] };
  const state = { ranks: new Map(), logs: new Map(), places: new Map() };
  const cause = (status) => findCause({ finished: true, status, exit, members: [], diagnosis: null }, state);
  assert.notEqual(cause("failed"), null);
  assert.equal(cause("cancelled"), null);
});
