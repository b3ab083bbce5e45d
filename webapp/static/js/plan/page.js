// The submit page: asks the planner as one types, shows what the layout costs and what stands in its way.
import { copyText, el, embedded } from "../dom.js";
import { parameters } from "../format.js";
import { readRanks } from "../pictures/ranks.js";
import { refused } from "../refusal.js";
import { best, filled, query, why } from "./best.js";
import { showEstimate } from "./estimate.js";
import { explainButtons } from "./explain.js";
import { showHeadline, told } from "./headline.js";
import { withParts } from "./kept.js";
import { showSoftware } from "./software.js";

const DELAY_MS = 150;
const form = document.getElementById("job-form");
const panel = document.getElementById("estimate");
const presets = embedded("presets");
const status = document.getElementById("plan-status");
const cluster = document.getElementById("f-cluster");
const compare = document.getElementById("compare");
compare.dataset.base = compare.getAttribute("href");
let latest = null; // the newest request; older answers are dropped
let again = null; // the timer of the next try
let spec = null; // as the server understood the form
let stages = {}; // those that memory and traffic are told of
let stepS = null; // predicted seconds of a step of it, null while it has a problem

function showModel() {
  const name = form.elements["model.preset"].value;
  const custom = name === "";
  document.getElementById("model-sizes").hidden = !custom;
  const note = document.getElementById("preset-note");
  const preset = presets[name];
  note.textContent = preset ? `${preset.description} · ${parameters(preset.parameters)} parameters` : `Your own sizes${withParts((part) => form.elements[`model.${part}`].value)}.`;
  if (preset) for (const [key, value] of Object.entries(preset.sizes)) setField(`model.${key}`, value);
}

function setField(name, value) {
  const control = form.elements[name];
  if (!control) return;
  control.disabled = false; // what is out of use is not sent
  if (control.type === "checkbox") control.checked = value;
  else control.value = value;
}

function holderOf(field) {
  const parts = field.split(".");
  while (parts.length > 0) {
    const holder = form.querySelector(`[data-for="${CSS.escape(parts.join("."))}"]`);
    if (holder && !holder.closest("[hidden]")) return holder;
    parts.pop();
  }
  return null;
}

function showProblems(problems, blocked) {
  for (const place of form.querySelectorAll(".field .problem")) place.textContent = "";
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
  const elsewhere = [];
  for (const { field, message } of problems) {
    const holder = holderOf(field);
    if (!holder) {
      elsewhere.push(`${field}: ${message}`);
      continue;
    }
    const place = holder.querySelector(".problem");
    place.textContent = [place.textContent, message].filter(Boolean).join("; ");
    unfold(holder);
    for (const control of holder.querySelectorAll("input, select")) control.setAttribute("aria-invalid", "true");
  }
  for (const { field, message } of blocked) {
    const place = holderOf(field)?.querySelector(".problem");
    if (place) place.textContent = [place.textContent, message].filter(Boolean).join("; ");
  }
  const other = document.getElementById("other-problems");
  other.hidden = elsewhere.length === 0;
  other.textContent = elsewhere.join("\n");
  const sent = form.dataset.sent !== undefined; // its answer is on the way
  document.getElementById("submit").disabled = sent || problems.length > 0 || blocked.length > 0;
}

/** What is wrong is not folded away. */
function unfold(holder) {
  const fold = holder.closest(".folds > details");
  if (fold) fold.open = true;
}

/** A choice that cannot be is disabled and says why: as a tooltip, and in words below the choices. */
function showChoices(choices) {
  for (const holder of form.querySelectorAll("[data-for^='layout.']")) {
    const options = choices[holder.dataset.for.slice("layout.".length)] ?? {};
    const reasons = new Map();
    for (const input of holder.querySelectorAll("input")) {
      const value = input.type === "checkbox" ? "true" : input.value;
      const reason = options[value] ?? null;
      // The chosen value stays usable: its reason stands beside the field as a problem.
      input.disabled = reason !== null && !input.checked;
      const label = input.closest("label");
      if (label) label.title = reason ?? "";
      if (reason && !input.checked) reasons.set(reason, [...(reasons.get(reason) ?? []), value]);
    }
    const list = holder.querySelector(".reasons");
    const lines = [...reasons].map(([reason, values]) => {
      const line = document.createElement("li");
      line.textContent = holder.querySelector("input[type=checkbox]") ? reason : `${values.join(", ")}: ${reason}`;
      return line;
    });
    list?.replaceChildren(...lines);
    const box = list?.closest(".why-not");
    if (!box) continue;
    box.toggleAttribute("data-empty", lines.length === 0);
    box.firstElementChild.textContent = `Why not ${[...reasons.values()].flat().map(shown(holder)).join(", ")}?`;
  }
}

/** The words of a choice, by its value. */
function shown(holder) {
  return (value) => holder.querySelector(`input[value="${CSS.escape(value)}"] + span`)?.textContent ?? value;
}

async function ask(triesLeft = 3) {
  latest?.abort();
  clearTimeout(again);
  const mine = new AbortController();
  latest = mine;
  panel.dataset.stale = "true";
  try {
    const answer = await fetch(form.dataset.planUrl, {
      method: "POST",
      body: new FormData(form),
      headers: { Accept: "application/json" },
      signal: mine.signal,
    });
    if (answer.redirected || answer.status === 403) throw new Error("you are logged out; open the page again");
    if (answer.status === 503) return askAgain(await refused(answer), answer.headers.get("Retry-After"), triesLeft);
    if (!answer.ok) throw new Error(await refused(answer));
    const plan = await answer.json();
    if (mine !== latest) return;
    spec = plan.spec;
    showProblems(plan.problems, plan.not_runnable);
    showChoices(plan.choices);
    panel.dataset.stale = String(!plan.estimate);
    stepS = plan.estimate?.time.step_s ?? null;
    if (plan.estimate) {
      showEstimate(panel, plan);
      showHeadline(document.getElementById("headline"), plan.estimate);
      stages = told(plan.estimate);
    }
    compare.href = `${compare.dataset.base}#${encodeURIComponent(JSON.stringify({ spec, cluster: cluster.value }))}`;
    tellStatus(plan);
  } catch (error) {
    if (error.name === "AbortError") return;
    status.textContent = `No estimate: ${error.message}.`;
    status.dataset.tone = "bad";
  }
  delete panel.querySelector(".estimate-body").dataset.reading;
}

/** Nothing is wrong with the draft: too much is planned just now. */
function askAgain(why, after, triesLeft) {
  if (triesLeft === 0) throw new Error(why);
  const seconds = Number(after) || 5;
  status.textContent = `No estimate yet: ${why}. Asking again in ${seconds} s.`;
  status.dataset.tone = "warn";
  again = setTimeout(() => ask(triesLeft - 1), 1000 * seconds);
}

function tellStatus(plan) {
  const number = plan.problems.length;
  const problems = number === 1 ? "One problem to solve first." : `${number} problems to solve first.`;
  const planned = "Planned only: the trainer does not run this yet.";
  status.textContent = number ? problems : plan.not_runnable.length ? planned : "This can run.";
  status.dataset.tone = number ? "bad" : plan.not_runnable.length ? "warn" : "good";
}

const CHUNKS = { interleaved_1f1b: "2", looped_bfs: "2", zbv: "2", dualpipev: "2" };

/** A schedule brings the number of chunks it needs; a degree typed by hand becomes a choice of its own. */
function follow(event) {
  const { target } = event;
  if (target.name === "layout.schedule") setField("layout.virtual_stages", CHUNKS[target.value] ?? "1");
  if (target.dataset.other === undefined || !/^\d+$/.test(target.value.trim())) return;
  const value = String(Number(target.value));
  const radios = [...form.querySelectorAll(`input[type=radio][name="${CSS.escape(target.dataset.other)}"]`)];
  const chosen = radios.find((radio) => radio.value === value) ?? addedRadio(target, value);
  chosen.disabled = false;
  chosen.checked = true;
}

/** Fills in one field as a person would: a button where it has one, a degree without one typed. */
function fill(name, value) {
  const radios = [...form.querySelectorAll(`input[type=radio][name="${CSS.escape(name)}"]`)];
  if (radios.length === 0) return setField(name, value);
  const other = form.querySelector(`[data-other="${CSS.escape(name)}"]`);
  const radio = radios.find((each) => each.value === String(value)) ?? (other && addedRadio(other, String(value)));
  if (!radio) return;
  radio.disabled = false;
  radio.checked = true;
}

function valueOf(name) {
  const control = form.elements[name];
  return control.type === "checkbox" ? control.checked : control.value;
}

async function fillBest() {
  const button = document.getElementById("best");
  const told = document.getElementById("best-told");
  const [words, undo] = told.children;
  button.disabled = true;
  told.hidden = false;
  undo.hidden = true;
  words.textContent = "Searching…";
  try {
    clearTimeout(timer);
    await ask();
    if (!spec) throw new Error("the form cannot be read yet");
    const found = await best(form.dataset.searchUrl, form.elements.csrfmiddlewaretoken.value, query(spec, cluster.value));
    const values = filled(found.best[0]);
    const before = Object.fromEntries(Object.keys(values).map((name) => [name, valueOf(name)]));
    words.textContent = why(found, stepS);
    put(values);
    undo.hidden = false;
    undo.onclick = () => {
      put(before);
      told.hidden = true;
      button.focus();
    };
  } catch (error) {
    words.textContent = `Nothing was filled in: ${error.message}.`;
  } finally {
    button.disabled = false;
  }
}

function put(values) {
  for (const [name, value] of Object.entries(values)) fill(name, value);
  showPipeline();
  ask();
}

/** A schedule is for two stages or more. */
function showPipeline() {
  document.getElementById("pipeline").hidden = valueOf("layout.pp") === "1";
}

function addedRadio(target, value) {
  target.parentElement.querySelector("label.added")?.remove();
  const radio = el("input", { type: "radio", name: target.dataset.other, value });
  target.before(el("label", { className: "added" }, radio, el("span", {}, value)));
  return radio;
}

let timer = null;
function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(ask, DELAY_MS);
}

function curl() {
  const body = JSON.stringify(spec, null, 2).replaceAll("'", "'\\''");
  return [
    `curl --fail-with-body ${location.origin}/api/v1/jobs \\`,
    `  -H "Authorization: Token $MESHBOARD_TOKEN" \\`,
    `  -H 'Content-Type: application/json' \\`,
    `  -d '${body}'`,
  ].join("\n");
}

function showAuto() {
  const chosen = form.elements.auto.checked;
  document.getElementById("auto-options").hidden = !chosen;
  document.getElementById("own-layout").hidden = chosen;
  document.getElementById("best").hidden = chosen;
  const micro = form.elements["train.micro_batches"];
  const hint = document.getElementById("h-train.micro_batches");
  hint.dataset.own ??= hint.textContent;
  micro.disabled = chosen;
  hint.textContent = chosen ? "chosen with the layout" : hint.dataset.own;
}

form.addEventListener("input", (event) => {
  if (event.target.name === "auto") showAuto();
  follow(event);
  showPipeline();
  showSoftware(form);
  askSoon();
});
cluster.addEventListener("change", askSoon);
explainButtons(panel, document.getElementById("explain"), form.dataset.explainUrl, async (figure) => {
  if (!spec) await ask(); // clicked before the first answer came
  return { spec, cluster: cluster.value, stage: stages[figure]?.stage ?? 0 };
});
form.elements["model.preset"].addEventListener("change", () => {
  showModel();
  askSoon();
});
document.getElementById("copy-curl").addEventListener("click", async () => {
  clearTimeout(timer);
  await ask(); // what was typed a moment ago counts too
  if (!spec) return;
  document.querySelector(".curl pre").textContent = curl();
  document.querySelector(".curl").open = true;
  const copied = await copyText(curl());
  document.getElementById("copied").textContent = copied
    ? "copied; it reads your API token from $MESHBOARD_TOKEN"
    : "the browser forbids copying: select the text below";
});
document.getElementById("best").addEventListener("click", fillBest);
readRanks(panel);
showPipeline();
showSoftware(form);
showAuto();
showModel();
ask();
