// The verdict panel: state, reason, next action, and folded evidence (jobs/core/verdict_schema.py).
import { counted } from "../format.js";
import { el, withCode, write } from "../dom.js";
import { plain } from "../logs/ansi.js";
import { findTraceback, showLines } from "../logs/rootcause.js";
import { upright } from "../upright.js";
import { BAD, endingWords } from "./ending.js";

const TONES = { starting: "info", well: "good", notice: "warn", slow: "warn", hung: "bad", failed: "bad" };
const UNCHECKED = /^Not checked\b/; // neutral: the run is neither good nor bad
const MAX_LOG_LINES = 8;
const RANK = /^\[[^\]]{0,40}\]:? ?/; // prefix of torchrun
const FRAME = /^(\s|$|Traceback )/; // a line of a traceback above the exception
const NONE = { state: "", reason: "", next: "", evidence: [], action: "", action_rank: -1 };

/** {state, sentence, reason, next, evidence, action, action_rank}. Pure. Stored payloads of older versions have no action. */
export function getVerdict(job) {
  const stored = job.diagnosis?.sentence ? { ...NONE, ...job.diagnosis } : null;
  if (stored && !stored.over && !job.finished) return stored;
  if (stored?.over) return stored.state === "starting" || (stored.state === "well" && job.status === "cancelled") ? { ...stored, state: "" } : stored;
  if (BAD.has(job.status)) return { ...NONE, state: "failed", sentence: `${endingWords(job)}.`, ...logAction(job) };
  if (stored) return { ...NONE, sentence: "The run ended. The verdict follows within seconds." };
  if (job.status === "queued") return { ...NONE, sentence: "Not checked: the job has not started." };
  if (job.finished) return { ...NONE, sentence: "Not checked: the run ended before its first step." };
  return { ...NONE, sentence: "Not checked: no step has finished yet." };
}

/** Return the end of the error in the log of the failed rank, or else the last lines of this log. Pure. */
export function lastLines(job, { sentence }) {
  if (!BAD.has(job.status) || !/^(Failed|Lost)\b/.test(sentence)) return [];
  const shown = job.exit?.evidence ?? [];
  if (shown.length > 0) return shown.map(plain).filter((text) => text.trim()).slice(-MAX_LOG_LINES);
  const { found, lines } = findTraceback(job.exit?.log_tail ?? []);
  const exception = found ? lines.findIndex((text) => !FRAME.test(text.replace(RANK, ""))) : -1; // lines below are of other output
  const own = exception < 0 ? lines : lines.slice(0, exception + 1);
  return own.filter((text) => text.trim()).slice(-MAX_LOG_LINES);
}

/** The log has more than the reason, if a host ran the job. */
function logAction(job) {
  if (job.members.length === 0) return {};
  const rank = job.exit?.rank ?? -1;
  return { next: "Read the log.", action: "open_log", action_rank: rank };
}

/**
 * Return the link or the button of an action, or null if the reader cannot take the action here. `press` is a call of the page.
 * @returns {{label: string, href?: string, press?: () => void} | null}
 */
function findAction({ action, action_rank: rank }, job, { mayRetry, openLog }) {
  const there = (id) => document.getElementById(id)?.hidden === false;
  if (action === "calibrate" && job.members.length > 0) return { label: "Calibrate host", href: `/hosts/${encodeURIComponent(job.members[0].host)}/#calibrate` };
  if (action === "retry" && mayRetry()) return { label: "Retry", press: () => document.getElementById("requeue-form").requestSubmit() };
  if (action === "resume_smaller" && there("smaller")) return { label: "Find smaller layout", href: "#smaller" };
  if (action === "copy_job" && there("copy-job")) return { label: "Copy job", href: document.getElementById("copy-job").getAttribute("href") };
  if (action === "open_breakdown" && there("parts")) return { label: "Open breakdown", href: "#parts" };
  if (action === "find_faster" && job.finished && there("advice")) return { label: "Find faster layouts", href: "#advice" };
  if (action === "open_log") return { label: rank >= 0 ? `Open log of rank ${rank}` : "Open log", press: () => openLog(rank) };
  return null;
}

/** `page`: {showSteps(first, last), mayRetry(), openLog(rank)}. */
export function healthView(section, page) {
  const part = (name) => section.querySelector(`[data-${name}]`);
  const [sentence, reason, next, action, log, evidence] = ["sentence", "reason", "next", "action", "log", "evidence"].map(part);
  let drawn = "";

  function showText(node, text) {
    node.replaceChildren(...withCode(upright(text)));
    node.closest("div").hidden = !text;
  }

  function line({ text, ranks, steps }) {
    const named = ranks.length > 0 && !/\brank/.test(text) ? ` (${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")})` : "";
    const item = el("li", {}, text + named);
    if (steps.length === 2) {
      const button = el("button", { type: "button", className: "button quiet small" }, `Show steps ${steps[0]}–${steps[1]}`);
      button.addEventListener("click", () => page.showSteps(...steps));
      item.append(" ", button);
    }
    return item;
  }

  /** @param {{label: string, href?: string, press?: () => void}} action */
  function makeButton({ label, href, press }) {
    if (href) return el("a", { className: "button small", href }, label);
    const button = el("button", { type: "button", className: "button small" }, label);
    button.addEventListener("click", press);
    return button;
  }

  /** `phase`: the phase of a start with its seconds, or "" after the first step. */
  return (job, phase) => {
    const stored = getVerdict(job);
    const offered = findAction(stored, job, page);
    const verdict = phase && ["starting", ""].includes(stored.state) ? { ...stored, sentence: phase, reason: "" } : stored;
    const lines = lastLines(job, verdict);
    const facts = verdict.evidence.filter(({ text }) => !lines.some((line) => line.trim() === text.trim()));
    const key = JSON.stringify([verdict.state, verdict.sentence, verdict.reason, verdict.next, facts, lines, offered?.label, offered?.href]);
    if (key === drawn) return;
    drawn = key;
    section.dataset.tone = verdict.state === "well" && UNCHECKED.test(verdict.sentence) ? "" : (TONES[verdict.state] ?? "");
    write(sentence, verdict.sentence);
    showText(reason, verdict.reason);
    showText(next, verdict.next);
    action.replaceChildren(...(offered ? [makeButton(offered)] : []));
    if (offered) action.closest("div").hidden = false;
    log.closest("div").hidden = lines.length === 0;
    showLines(log, lines);
    evidence.hidden = facts.length === 0;
    evidence.querySelector("summary").textContent = `Evidence (${counted(facts.length, "fact")})`;
    evidence.querySelector("ul").replaceChildren(...facts.map(line));
  };
}
