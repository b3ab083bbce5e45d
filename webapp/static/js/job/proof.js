// What is proven of a run, in words: traffic, copies, one process. What is not proven says "not checked".
import { el } from "../dom.js";
import { duration, exactBytes, integer } from "../format.js";
import { refill } from "../refill.js";
import { showCheck } from "./check.js";

/** A relative difference: "3e-7", "0.31". */
export function apartWords(value) {
  if (value === null) return "no number";
  if (value === 0) return "0";
  return value >= 0.01 ? String(Number(value.toPrecision(2))) : value.toExponential(0);
}

/**
 * {tone, words, more} of bytes and calls: the ranks' own verdicts once they are there, the steps so far until then.
 * `exact` is false where a router decides how much goes to whom; `ranks`: that have a verdict to tell.
 */
export function trafficProof(state, comparison, finished, exact, ranks) {
  const rows = exact ? "" : "; over ep for the rows that the run's own router chose";
  if (state.verdicts.size > 0) {
    let [bytesOff, callsOff, sent] = [0, 0, 0];
    for (const row of [...state.verdicts.values()].flat()) {
      sent += row.predicted_count + row.measured_count;
      bytesOff += Math.abs(row.measured_bytes - row.predicted_bytes);
      callsOff += Math.abs(row.measured_count - row.predicted_count);
    }
    const off = bytesOff !== 0 || callsOff !== 0;
    const told = state.verdicts.size;
    const of = told < ranks ? `${integer(told)} of ${integer(ranks)} ranks` : told === 1 ? "1 rank" : `${integer(told)} ranks`;
    return {
      tone: off ? "bad" : told < ranks ? "" : "good",
      words: `${exactBytes(bytesOff)}, ${integer(callsOff)} ${callsOff === 1 ? "call" : "calls"}`,
      more: `off in all, over every phase of ${of}${sent ? rows : "; nothing was to be sent, and nothing was"}`,
    };
  }
  if (!comparison) return { tone: "", words: "not checked", more: finished ? "no step was counted" : "no step has ended" };
  const good = comparison.bytesOff === 0 && comparison.callsOff === 0;
  return {
    tone: good ? "" : "bad",
    words: `${exactBytes(comparison.bytesOff)}, ${integer(comparison.callsOff)} ${comparison.callsOff === 1 ? "call" : "calls"}`,
    more: finished ? "off in the steps that were counted; its end was not checked" : "off in the steps so far",
  };
}

/** The same of copies on several ranks. */
export function replicaProof(proof) {
  if (!proof || proof.replicas.steps.length === 0) return { tone: "", words: "not checked", more: "no step was looked at" };
  const { replicas, wrong } = proof;
  const differing = wrong.filter((apart) => apart.ranks.length === 2 || apart.what === "share");
  const others = new Set(wrong.filter((apart) => apart.what === "rows").map((apart) => apart.ranks[0]));
  const after = `after ${replicas.steps.length === 1 ? "step" : "steps"} ${replicas.steps.map(integer).join(" and ")}`;
  const more = `${integer(replicas.copied)} of ${integer(replicas.parts)} parts of tensors have copies; gradients, weights and the rows trained on, ${after}`;
  if (others.size > 0) return { tone: "bad", words: `${others.size === 1 ? "a rank" : `${integer(others.size)} ranks`} trained on other rows`, more };
  if (differing.length > 0) return { tone: "bad", words: "replicas differ", more };
  if (replicas.copied === 0) return { tone: "good", words: "no copies", more: `each part lies on one rank; ${after}` };
  const words = replicas.apart === 0 ? "replicas agree" : `replicas agree to ${apartWords(replicas.apart)}`;
  return { tone: "good", words, more };
}

const ROUNDING = 1e-5; // of fp32: gradients beyond it are not called equal, only within their limit

function nearWords({ gradient, limit }, precision) {
  if (gradient <= ROUNDING) return `gradients equal to one process to ${apartWords(gradient)}`;
  const whose = precision === "fp32" ? "their" : `${precision}'s`;
  if (gradient > limit) return `gradients within ${whose} limits (${apartWords(gradient)})`; // of vectors: a wider one
  return `gradients within ${whose} limit of ${apartWords(limit)} (${apartWords(gradient)})`;
}

/** Of a mixture: one process follows the run's routers, and says where its own would have gone elsewhere. */
function choiceWords({ choices }) {
  if (!choices) return "";
  const followed = `\nIt took the experts that the run's routers chose for ${integer(choices.tokens)} tokens of all layers`;
  if (choices.turned === 0) return `${followed}: all as its own`;
  return `${followed}: ${integer(choices.turned)} ${choices.turned === 1 ? "another" : "others"} than its own, less probable by at most ${apartWords(choices.gap)} of the experts' spread`;
}

function figures(one) {
  return (
    `largest relative difference of ${integer(one.tensors)} gradients ${apartWords(one.gradient)}, updates ${apartWords(one.update)}, ` +
    `norms ${apartWords(one.norm)}, losses ${apartWords(one.loss)} over ${integer(one.steps)} ${one.steps === 1 ? "step" : "steps"}; took ${duration(one.seconds)}${choiceWords(one)}`
  );
}

/** Of the step that both did when the run was over. */
function endWords(end, finished) {
  if (!end) return "";
  if (end.state === "due") return finished ? "\nIt ended before one step more was compared" : "\nOne step more comes when it ends";
  if (end.state === "not checked") return `\nOne step more was not checked: ${end.why}`;
  return `\nOne step more than it has, and its last validation if it had one: ${figures(end)}${end.why && `\n${end.why}`}`;
}

/** Where none of the first steps was compared: an attempt that had none left has one step more all the same. */
function endAlone(end, why, finished, precision) {
  const more = `${why}${endWords(end, finished)}`;
  if (end?.state === "apart") return { tone: "bad", words: "differs from one process at its end", more };
  if (end?.state === "equal") return { tone: "good", words: nearWords(end, precision), more };
  return { tone: "", words: "not checked", more };
}

/** The same of the first steps beside one process, and of one more at the end; in `more` each has a line of its own. */
export function processProof(proof, finished, precision) {
  if (!proof) return { tone: "", words: "not checked", more: finished ? "the run ended before" : "waits for the first step", waits: !finished };
  const one = proof.one_process;
  if (one.state === "not checked") return endAlone(proof.end, one.why, finished, precision);
  if (one.state === "due") {
    if (finished) return { tone: "", words: "not checked", more: `the run ended before step ${integer(one.steps)} was compared` };
    return { tone: "", words: "being verified", more: `by one process, after step ${integer(one.steps)}` };
  }
  const more = `${figures(one)}${one.why && `\n${one.why}`}${endWords(proof.end, finished)}`;
  if (one.state === "apart") return { tone: "bad", words: "differs from one process", more };
  if (proof.end?.state === "apart") return { tone: "bad", words: "differs from one process at its end", more };
  return { tone: "good", words: nearWords(one, precision), more };
}

function whereWords({ what, axis, ranks }) {
  if (what === "rows") return `rank ${ranks[0]} beside rank 0's data`;
  if (what === "choice") return "all ranks' tokens beside one process";
  if (ranks.length === 2) return `rank ${ranks[0]} differs from rank ${ranks[1]}, over ${axis}`;
  return ranks.length === 1 ? `rank ${ranks[0]} beside one process` : "all ranks together";
}

function apartLine({ what, name, axis, ranks, apart, limit }) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, what),
    el("td", { className: "wrap" }, name),
    el("td", {}, whereWords({ what, axis, ranks })),
    el("td", { className: "number off" }, apartWords(apart)),
    el("td", { className: "number" }, apartWords(limit)),
  );
}

function fill(place, { tone, words, more }) {
  const figure = place.querySelector("dd");
  figure.textContent = words;
  figure.dataset.tone = tone;
  place.querySelector("small").replaceChildren(...more.split("\n").map((line) => el("span", {}, line)));
}

/** The panel: three figures, the verdict of all, and a table of what is wrong. */
export function showProof(panel, state, comparison, finished, exact, precision, ranks) {
  const parts = [
    trafficProof(state, comparison, finished, exact, ranks),
    replicaProof(state.proof),
    processProof(state.proof, finished, precision),
  ];
  [...panel.querySelectorAll("[data-part]")].forEach((place, index) => fill(place, parts[index]));
  const check = panel.querySelector("#check");
  if (check) showCheck(check, parts[2], (proof) => processProof(proof, true, precision).words);
  const badge = panel.querySelector("[data-verdict]");
  const tones = parts.map((part) => part.tone);
  const proven = tones.every((tone) => tone === "good");
  badge.dataset.tone = tones.includes("bad") ? "bad" : proven ? "good" : "warn";
  badge.textContent = parts.map((part) => part.words).join("; ");
  const wrong = state.proof?.wrong ?? [];
  panel.querySelector("[data-wrong]").hidden = wrong.length === 0;
  refill(panel.querySelector("tbody"), ...wrong.map(apartLine));
}
