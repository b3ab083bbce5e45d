// The verification of a run: traffic, replicas, single-process reference.
import { el } from "../dom.js";
import { counted, duration, exactBytes, integer } from "../format.js";
import { refill } from "../refill.js";
import { showCheck } from "./check.js";

/** Format a relative difference: "3e-7", "0.31". */
export function apartWords(value) {
  if (value === null) return "NaN or infinite";
  if (value === 0) return "0";
  return value >= 0.01 ? String(Number(value.toPrecision(2))) : value.toExponential(0);
}

/**
 * Return {tone, words, more} of the traffic: from the verdicts of the ranks, or before them from the steps so far. `exact`
 * is false if a router decides the traffic. `ranks` is the number of ranks that send a verdict.
 */
export function trafficProof(state, comparison, finished, exact, ranks) {
  const routing = exact ? "" : ", for the expert routing that the run chose";
  if (state.verdicts.size > 0) {
    let [bytesOff, callsOff, sent] = [0, 0, 0];
    for (const row of [...state.verdicts.values()].flat()) {
      sent += row.predicted_count + row.measured_count;
      bytesOff += Math.abs(row.measured_bytes - row.predicted_bytes);
      callsOff += Math.abs(row.measured_count - row.predicted_count);
    }
    const off = bytesOff !== 0 || callsOff !== 0;
    const count = state.verdicts.size;
    const of = count < ranks ? `${integer(count)} of ${integer(ranks)} ranks` : count === 1 ? "1 rank" : `${integer(count)} ranks`;
    return {
      tone: off ? "bad" : count < ranks ? "" : "good",
      words: `${exactBytes(bytesOff)}, ${integer(callsOff)} ${callsOff === 1 ? "call" : "calls"}`,
      more: `Total traffic difference over all phases of ${of}${sent ? `${routing}.` : " (no traffic expected, none measured)."}`,
    };
  }
  if (!comparison) return { tone: "", words: "not checked", more: finished ? "No step was measured." : "Waiting for the first step." };
  const good = comparison.bytesOff === 0 && comparison.callsOff === 0;
  return {
    tone: good ? "" : "bad",
    words: `${exactBytes(comparison.bytesOff)}, ${integer(comparison.callsOff)} ${comparison.callsOff === 1 ? "call" : "calls"}`,
    more: finished ? "Total traffic difference of the measured steps. The traffic at the end of the run was not checked." : "Total traffic difference so far.",
  };
}

/** Return {tone, words, more} of replicas. */
export function replicaProof(proof) {
  if (!proof || proof.replicas.steps.length === 0) return { tone: "", words: "not checked", more: "Replicas were not compared in any step." };
  const { replicas, wrong } = proof;
  const differing = wrong.filter((apart) => apart.ranks.length === 2 || apart.what === "share");
  const others = new Set(wrong.filter((apart) => apart.what === "rows").map((apart) => apart.ranks[0]));
  const after = `after ${replicas.steps.length === 1 ? "step" : "steps"} ${replicas.steps.map(integer).join(" and ")}`;
  const more = `${integer(replicas.copied)} of ${integer(replicas.parts)} shards have replicas. Gradients, weights, and training data of the replicas were compared ${after}.`;
  if (others.size > 0) return { tone: "bad", words: `${counted(others.size, "rank")} trained on other data`, more };
  if (differing.length > 0) return { tone: "bad", words: "replicas differ", more };
  if (replicas.copied === 0) return { tone: "good", words: "no replicas", more: `Each shard is on one rank only. Compared ${after}.` };
  const words = replicas.apart === 0 ? "replicas match" : `replicas match within ${apartWords(replicas.apart)}`;
  return { tone: "good", words, more };
}

/** The worst of the differences, so that no small one hides a large one. */
function nearWords({ gradient, update, norm }) {
  return `gradients, updates, and norms match the reference within ${apartWords(Math.max(gradient, update, norm))}`;
}

/** Describe the expert choices. The reference uses those of the run and counts where its own router differs. */
function choiceWords({ choices }) {
  if (!choices) return "";
  const followed = `\nThe reference uses the run's expert choices for ${counted(choices.tokens, "token")}, summed over layers.`;
  if (choices.turned === 0) return `${followed} The router of the reference chooses the same experts as the run.`;
  return `${followed} The router of the reference prefers another expert for ${counted(choices.turned, "token")}, by at most ${apartWords(choices.gap)} of the spread of expert log-probabilities.`;
}

function figures(one) {
  return (
    `Largest relative differences from the reference over ${counted(one.steps, "step")}: ` +
    `gradients ${apartWords(one.gradient)} (${counted(one.tensors, "tensor")}), updates ${apartWords(one.update)}, norms ${apartWords(one.norm)}, ` +
    `losses ${apartWords(one.loss)}. The check took ${duration(one.seconds)}.${choiceWords(one)}`
  );
}

/** Describe the final check. */
function endWords(end, finished) {
  if (!end) return "";
  if (end.state === "due") return finished ? "\nThe run ended before the final check." : "\nA final check runs when the job ends.";
  if (end.state === "not checked") return `\nNo final check: ${end.why}`;
  return `\nFinal check (one extra step and the last validation): ${figures(end)}${end.why && `\n${end.why}`}`;
}

/** Return the result of the final check alone, if no first step was compared. */
function endAlone(end, why, finished) {
  const more = `${why}${endWords(end, finished)}`;
  if (end?.state === "apart") return { tone: "bad", words: "differs from the reference in the final check", more };
  if (end?.state === "equal") return { tone: "good", words: nearWords(end), more };
  return { tone: "", words: "not checked", more };
}

/** Return {tone, words, more} of the first steps and the final check. In `more` each check has its own line. */
export function processProof(proof, finished) {
  if (!proof) return { tone: "", words: "not checked", more: finished ? "The run ended before the check." : "Waiting for the first step.", waits: !finished };
  const one = proof.one_process;
  if (one.state === "not checked") return endAlone(proof.end, one.why, finished);
  if (one.state === "due") {
    if (finished) return { tone: "", words: "not checked", more: `The run ended before step ${integer(one.steps)} was compared with the single-process reference.` };
    return { tone: "", words: "in progress", more: `The run is compared with the single-process reference after step ${integer(one.steps)}.` };
  }
  const more = `${figures(one)}${one.why && `\n${one.why}`}${endWords(proof.end, finished)}`;
  if (one.state === "apart") return { tone: "bad", words: "differs from reference", more };
  if (proof.end?.state === "apart") return { tone: "bad", words: "differs from the reference in the final check", more };
  const lacksFinal = proof.end?.state === "not checked" || (proof.end?.state === "due" && finished);
  if (lacksFinal) return { tone: "", words: `${nearWords(one)}; the final step was not compared`, more };
  return { tone: "good", words: nearWords(one), more };
}

function whereWords({ what, axis, ranks }) {
  if (what === "rows") return `data of rank ${ranks[0]} compared with rank 0`;
  if (what === "choice") return "tokens of all ranks compared with the reference";
  if (ranks.length === 2) return `rank ${ranks[0]} differs from rank ${ranks[1]} (axis ${axis})`;
  return ranks.length === 1 ? `rank ${ranks[0]} compared with the reference` : "all ranks together";
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

/** Reasons of the trainer have no capital letter and no period. */
const sentence = (line) => `${line.charAt(0).toUpperCase()}${line.slice(1)}${/[.:)]$/.test(line) || line === "" ? "" : "."}`;

const NUMBER = /(\d[\d.]*e[+-]?\d+)/; // "4e-7", which must not break after the hyphen

/** Return the line as nodes. Numbers of older hosts lose the zero of "1e-05". */
function numbered(line) {
  const text = line.replace(/(\de[+-])0(?=\d)/g, "$1");
  return text.split(new RegExp(NUMBER, "g")).map((part) => (NUMBER.test(part) ? el("span", { className: "unbroken" }, part) : part));
}

function fill(place, { tone, words, more }) {
  const figure = place.querySelector("dd");
  figure.textContent = words;
  figure.dataset.tone = tone;
  place.querySelector("small").replaceChildren(...more.split("\n").map((line) => el("span", {}, ...numbered(sentence(line)))));
}

/** Fill the panel: three results, the badge, and the table of differences. */
export function showProof(panel, state, comparison, finished, exact, ranks) {
  const parts = [
    trafficProof(state, comparison, finished, exact, ranks),
    replicaProof(state.proof),
    processProof(state.proof, finished),
  ];
  [...panel.querySelectorAll("[data-part]")].forEach((place, index) => fill(place, parts[index]));
  const check = panel.querySelector("#check");
  if (check) showCheck(check, parts[2], (proof) => processProof(proof, true).words);
  const badge = panel.querySelector("[data-verdict]");
  const tones = parts.map((part) => part.tone);
  const proven = tones.every((tone) => tone === "good");
  badge.dataset.tone = tones.includes("bad") ? "bad" : proven ? "good" : "warn";
  badge.textContent = tones.includes("bad") ? "difference found" : proven ? "all checks passed" : "not fully checked";
  const wrong = state.proof?.wrong ?? [];
  panel.querySelector("[data-wrong]").hidden = wrong.length === 0;
  refill(panel.querySelector("tbody"), ...wrong.map(apartLine));
}
