// The cause of a failure: first failed rank, traceback, last collective. Only `showCause` and `showLines` change the page.
import { el } from "../dom.js";
import { plain } from "./ansi.js";
import { findLevel } from "./levels.js";
import { lastCollective } from "./places.js";

const TRACEBACK = /^(?:\[[^\]]{0,40}\]:? ?)?Traceback \(most recent call last\)/;
const PREFIX = /^\[[^\]]{0,40}\]:? ?/; // of torchrun, for example "[rank1]: "
const MAX_REASON_CHARACTERS = 240;

/** Return the number of lines of a traceback: up to the exception, and indented lines of its message. */
function countLines(texts) {
  const isIndented = (text) => /^\s/.test(text.replace(PREFIX, ""));
  const last = texts.findIndex((text, i) => i > 0 && text.trim() !== "" && !isIndented(text));
  if (last < 0) return texts.length;
  const beyond = texts.findIndex((text, i) => i > last && !isIndented(text));
  return beyond < 0 ? texts.length : beyond;
}

/** Return the last traceback of some lines, or else the last lines. */
export function findTraceback(lines, few = 12) {
  const texts = lines.map(plain);
  const begin = texts.findLastIndex((text) => TRACEBACK.test(text));
  if (begin < 0) return { found: false, lines: texts.filter((text) => text.trim()).slice(-few) };
  const rest = texts.slice(begin);
  return { found: true, lines: rest.slice(0, countLines(rest)) };
}

/** Return {title, reason, collective, lines, found} of a failed or lost job, else null. */
export function findCause(job, state) {
  const { exit } = job;
  const illEnds = ["failed", "lost"]; // ranks of a cancelled job may fail too
  if (!exit || !illEnds.includes(job.status) || !illEnds.includes(exit.outcome)) return null;
  const { rank } = exit;
  const known = rank === null || rank === undefined ? null : rank;
  const member = job.members.find((one) => known !== null && one.first_rank <= known && known < one.first_rank + one.num_ranks);
  const several = job.members.length > 1;
  const on = several && member ? ` on ${member.host}` : "";
  const first = state.ranks.size > 1 || several ? " first" : "";
  const title = known === null ? "Last log lines of the launcher" : `Rank ${known}${on} failed${first}`;
  const cells = known === null ? [] : [...(state.ranks.get(known)?.cells.values() ?? [])];
  const log = known === null ? state.logs.get(-1) : state.logs.get(known);
  const held = log ? findTraceback(log.lines.filter((line) => line.text !== undefined).map((line) => line.text)) : { found: false };
  const shown = exit.evidence?.length ? { found: true, lines: exit.evidence.map(plain) } : null;
  const words = shown ?? (held.found ? held : findTraceback(exit.log_tail ?? []));
  const collective = known === null ? "" : lastCollective(known, state.places, cells);
  return { title, rank: known, reason: exit.reason ?? "", collective, ...words };
}

/** Return the index of the last line of an error, such as the exception of a traceback, or else of the last line. */
export function findErrorLine(lines) {
  const carry = { open: false };
  const last = lines.map((text) => findLevel(text, carry)).lastIndexOf("error");
  return last < 0 ? lines.length - 1 : last;
}

/** Fill a box with lines, and scroll down until the line of the error is visible. */
export function showLines(box, lines) {
  const next = findErrorLine(lines) + 1;
  const above = el("span", {}, lines.slice(0, next).join("\n"));
  box.replaceChildren(above, lines.slice(next).map((text) => `\n${text}`).join(""));
  box.scrollTop = 0;
  const hidden = above.getBoundingClientRect().bottom - box.getBoundingClientRect().bottom; // px below the box
  box.scrollTop = Math.ceil(hidden + parseFloat(getComputedStyle(box).paddingBottom));
}

/** Show the cause above the log, or hide it. `go()` scrolls to the lines. */
export function showCause(box, cause, go) {
  box.hidden = cause === null;
  if (cause === null) return;
  const key = JSON.stringify(cause);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const isRepeated = cause.found && cause.reason.length > MAX_REASON_CHARACTERS; // the lines below contain the whole message
  const reason = isRepeated ? `${cause.reason.slice(0, MAX_REASON_CHARACTERS).trimEnd()}…` : cause.reason;
  const parts = [el("h3", {}, `Root cause: ${cause.title}`), el("p", {}, reason)];
  if (cause.rank !== null) {
    parts.push(el("p", { className: "note" }, cause.collective || "Last collective unknown."));
  }
  const words = el("pre", { className: "log-cause-lines", tabIndex: 0 });
  if (cause.lines.length > 0) {
    words.setAttribute("aria-label", cause.found ? "Error" : "Last lines");
    parts.push(el("h4", {}, cause.found ? "Error" : "Last lines"), words);
  }
  const button = el("button", { type: "button", className: "button small" }, "Show in log");
  button.addEventListener("click", () => go(cause));
  parts.push(button);
  box.replaceChildren(...parts);
  showLines(words, cause.lines);
}
