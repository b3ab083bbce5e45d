import assert from "node:assert/strict";
import test from "node:test";

import { plain, segments } from "../../webapp/static/js/logs/ansi.js";
import { View } from "../../webapp/static/js/logs/lines.js";
import { findCause, findTraceback } from "../../webapp/static/js/logs/rootcause.js";

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

test("counts only the new lines after an insertion", () => {
  const line = (time) => ({ time, level: "info", text: "" });
  const logs = new Map([[0, { start: 0, lines: [1, 2, 3, 4].map(line) }]]);
  const view = new View(null);
  view.pull(logs);
  logs.set(1, { start: 0, lines: [line(1.5)] });
  const { from, fresh } = view.pull(logs);
  assert.deepEqual([from, fresh], [1, 1]);
});

test("ends a traceback at its exception", () => {
  const trace = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()"];
  const error = ["RuntimeError: Error(s) in loading state_dict:", "  size mismatch for a"];
  assert.deepEqual(findTraceback(["step 1", ...trace, ...error, "step 2", "step 3"]).lines, [...trace, ...error]);
  const prefixed = [...trace, ...error].map((line) => `[rank1]: ${line}`);
  assert.deepEqual(findTraceback([...prefixed, "[rank1]: bye"]).lines, prefixed);
  assert.deepEqual(findTraceback(trace).lines, trace);
});

test("shows the root cause of a failed job, but not of a cancelled job", () => {
  const exit = { outcome: "failed", reason: "rank 0 was killed", rank: null, log_tail: ["boom"] };
  const state = { ranks: new Map(), logs: new Map(), places: new Map() };
  const cause = (status) => findCause({ finished: true, status, exit, members: [], diagnosis: null }, state);
  assert.notEqual(cause("failed"), null);
  assert.equal(cause("cancelled"), null);
});
