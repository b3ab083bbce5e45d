// The job form. It plans the draft after each change, and shows the estimate and all problems.
import { copyText, el, embedded, withCode } from "../dom.js";
import { parameters } from "../format.js";
import { readRanks } from "../pictures/ranks.js";
import { failed, refused } from "../refusal.js";
import { best, filled, query, why } from "./best.js";
import { showEstimate } from "./estimate.js";
import { explainButtons } from "./explain.js";
import { setUpConfigImport, setUpLayoutImport } from "./file_import.js";
import { showHeadline, findBusiestStages } from "./headline.js";
import { withParts } from "./hidden_parts.js";
import { setUpOwnAccelerator } from "./own_accelerator.js";

const DELAY_MS = 150;
const form = document.getElementById("job-form");
const panel = document.getElementById("estimate");
const presets = embedded("presets");
const schedules = embedded("schedules"); // {name: {label, chunks}}
const status = document.getElementById("plan-status");
const cluster = document.getElementById("f-cluster");
const compare = document.getElementById("compare");
compare.dataset.base = compare.getAttribute("href");
let latest = null; // the newest request, because older answers are dropped
let again = null; // the timer of the next retry
let spec = null; // the draft as the server read it
let stages = {}; // the stages that the memory and traffic figures are for
let stepS = null; // predicted step time (s), or null while the draft has a problem
let readiness = null; // the badge of a valid draft
let edited = false; // whether the form has changes that its address lacks

function showModel() {
  const name = form.elements["model.preset"].value;
  const custom = name === "";
  document.getElementById("model-sizes").hidden = !custom;
  const note = document.getElementById("preset-note");
  const preset = presets[name];
  note.textContent = preset ? `${preset.description} · ${parameters(preset.parameters)} parameters` : `Custom sizes${withParts((part) => form.elements[`model.${part}`].value)}.`;
  if (preset) for (const [key, value] of Object.entries(preset.sizes)) setField(`model.${key}`, value);
}

/** Fills in the sizes of an imported model. */
function useModel({ fields }) {
  form.elements["model.preset"].value = "";
  put(Object.fromEntries(Object.entries(fields).map(([name, value]) => [`model.${name}`, value ?? ""])));
  showModel();
}

/** Fills in an imported layout. The device and the software stay, because jobs run Meshboard's trainer. */
function useLayout({ spec: { layout, train, model }, fields }) {
  if (form.elements.auto.checked) {
    form.elements.auto.checked = false;
    showAuto();
  }
  if (model?.preset) {
    put({ "model.preset": model.preset });
    showModel();
  } else if (model) {
    useModel({ fields });
  }
  put(Object.fromEntries(Object.entries({ layout, train }).flatMap(([section, values]) =>
    Object.entries(values).map(([name, value]) => [`${section}.${name}`, value ?? ""]))));
}

function setField(name, value) {
  const control = form.elements[name];
  if (!control) return;
  control.disabled = false; // because disabled controls are not sent
  if (control.type === "checkbox") control.checked = value;
  else control.value = value;
}

function findHolder(field) {
  const parts = field.split(".");
  while (parts.length > 0) {
    const holder = form.querySelector(`[data-for="${CSS.escape(parts.join("."))}"]`);
    if (holder && !holder.closest("[hidden]")) return holder;
    parts.pop();
  }
  return null;
}

function showProblems(problems, blocked) {
  for (const place of form.querySelectorAll(".problem")) place.textContent = "";
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
  const elsewhere = [];
  for (const { field, message } of problems) {
    const holder = findHolder(field);
    if (!holder) {
      elsewhere.push(message.includes("`") ? message : `${field}: ${message}`);
      continue;
    }
    addProblem(holder, message);
    unfold(holder);
    // A problem of a group, such as the whole layout, marks none of its fields.
    if (holder.classList.contains("field")) markInvalid(holder);
  }
  for (const { field, message } of blocked) {
    const holder = findHolder(field);
    if (!holder) continue;
    addProblem(holder, message);
    unfold(holder);
  }
  const other = document.getElementById("other-problems");
  other.hidden = elsewhere.length === 0;
  other.replaceChildren(...elsewhere.map((message) => el("p", {}, ...withCode(message))));
  const sent = form.dataset.sent !== undefined; // the answer to the submit is pending
  document.getElementById("submit").disabled = sent || problems.length > 0 || blocked.length > 0;
}

function addProblem(holder, message) {
  const place = holder.querySelector(":scope > .problem") ?? holder.querySelector(".problem");
  place.append(...(place.childNodes.length ? [" "] : []), ...withCode(message));
}

function markInvalid(holder) {
  const own = [...holder.querySelectorAll("input, select")].filter((control) => control.closest("[data-for]") === holder);
  const other = holder.querySelector("[data-other]");
  const marked = other?.value ? [other] : own.filter((control) => control.type !== "radio" || control.checked);
  for (const control of marked) if (control !== other || other.value) control.setAttribute("aria-invalid", "true");
}

/** Opens the fold of a field with a problem. */
function unfold(holder) {
  const fold = holder.closest(".folds > details");
  if (fold) fold.open = true;
}

/** Disables unavailable choices. The reasons are in their tooltips and below the choices. */
function showChoices(choices) {
  for (const holder of form.querySelectorAll("[data-for^='layout.']")) {
    const options = choices[holder.dataset.for.slice("layout.".length)] ?? {};
    const reasons = new Map();
    for (const input of holder.querySelectorAll("input")) {
      const value = input.type === "checkbox" ? "true" : input.value;
      const reason = options[value] ?? null;
      // The chosen value stays enabled, because its reason is shown as a problem.
      input.disabled = reason !== null && !input.checked;
      const label = input.closest("label");
      if (label) label.title = reason ?? "";
      if (reason && !input.checked) reasons.set(reason, [...(reasons.get(reason) ?? []), value]);
    }
    const list = holder.querySelector(".reasons");
    const lines = [...reasons].map(([reason, values]) => {
      const options = holder.querySelector("input[type=checkbox]") ? "Unavailable" : values.map(shown(holder)).join(", ");
      return el("li", {}, `${options}: `, ...withCode(reason));
    });
    list?.replaceChildren(...lines);
    const box = list?.closest(".why-not");
    if (!box) continue;
    box.hidden = lines.length === 0;
  }
}

/** The label of a choice, by its value. */
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
    if (answer.redirected || answer.status === 403) throw new Error("you are logged out. Open the page again");
    if (answer.status === 503) return askAgain(await refused(answer), answer.headers.get("Retry-After"), triesLeft);
    if (!answer.ok) throw new Error(await refused(answer));
    const plan = await answer.json();
    if (mine !== latest) return;
    const { allow_unfit: _, ...draft } = plan.spec; // a setting of the submit, and not of the plan
    spec = draft;
    readiness = plan.readiness ?? null;
    if (edited) history.replaceState(null, "", `${location.pathname}?${plan.query}`);
    showProblems(plan.problems, plan.not_runnable);
    showChoices(plan.choices);
    panel.dataset.stale = String(!plan.estimate);
    stepS = plan.estimate?.time.step_s ?? null;
    if (plan.estimate) {
      showEstimate(panel, plan);
      showHeadline(document.getElementById("headline"), plan.estimate);
      stages = findBusiestStages(plan.estimate);
    }
    const state = encodeURIComponent(JSON.stringify({ spec, cluster: cluster.value }));
    for (const link of [compare, ...document.querySelectorAll("[data-planner]")]) link.href = `${compare.dataset.base}#${state}`;
    showStatus(plan);
  } catch (error) {
    if (error.name === "AbortError") return;
    badge(failed("No estimate", error.message), "bad");
  }
  delete panel.querySelector(".estimate-body").dataset.reading;
}

/** The planner is busy, so the draft is planned again later. */
function askAgain(why, after, triesLeft) {
  if (triesLeft === 0) throw new Error(why);
  const seconds = Number(after) || 5;
  status.textContent = `The planner is busy. Retrying in ${seconds} s.`;
  status.dataset.tone = "warn";
  again = setTimeout(() => ask(triesLeft - 1), 1000 * seconds);
}

const TONES = { ready: "good", waits: "warn", warns: "warn", unfit: "bad" };

function showStatus(plan) {
  const number = plan.problems.length;
  if (number) return badge(number === 1 ? "Fix one problem to submit." : `Fix ${number} problems to submit.`, "bad");
  if (plan.not_runnable.length) return badge("Planning only: the trainer cannot run this job.", "warn");
  badge(readiness?.message ?? "", TONES[readiness?.state] ?? "good");
}

function badge(text, tone) {
  status.textContent = text;
  status.dataset.tone = tone;
}

/** Sets the chunks that a schedule needs, and keeps the choices of a degree and its other box in agreement. */
function follow(event) {
  const { target } = event;
  if (target.name === "layout.schedule") setField("layout.virtual_stages", schedules[target.value].chunks);
  if (target.type === "radio") clearOther(target.name);
  if (target.dataset.other !== undefined) chooseOther(target);
}

const findOther = (name) => form.querySelector(`[data-other="${CSS.escape(name)}"]`);
const findRadios = (name) => [...form.querySelectorAll(`input[type=radio][name="${CSS.escape(name)}"]`)];

function clearOther(name) {
  const other = findOther(name);
  if (!other) return;
  other.value = "";
  delete other.dataset.chosen;
  other.removeAttribute("aria-invalid");
  other.parentElement.querySelector("label.added")?.remove();
}

/** The typed degree becomes the chosen one. An empty box chooses 1. */
function chooseOther(other) {
  const text = other.value.trim();
  const value = /^\d+$/.test(text) ? String(Number(text)) : text;
  const listed = findRadios(other.dataset.other).filter((radio) => !radio.closest(".added"));
  const radio = listed.find((each) => each.value === (value || "1")) ?? hiddenRadio(other, value);
  radio.disabled = false;
  radio.checked = true;
  if (radio.closest(".added")) other.dataset.chosen = "";
  else delete other.dataset.chosen;
}

/** The form sends the degree in the box as a hidden choice. */
function hiddenRadio(other, value) {
  let label = other.parentElement.querySelector("label.added");
  if (!label) {
    label = el("label", { className: "added", hidden: true }, el("input", { type: "radio", name: other.dataset.other }));
    other.before(label);
  }
  label.firstElementChild.value = value;
  return label.firstElementChild;
}

/** Fills in one field: a choice if it has one, otherwise its text. */
function fill(name, value) {
  const radios = findRadios(name);
  if (radios.length === 0) return setField(name, value);
  const other = findOther(name);
  const radio = radios.find((each) => each.value === String(value) && !each.closest(".added"));
  if (radio) {
    clearOther(name);
    radio.disabled = false;
    radio.checked = true;
  } else if (other) {
    other.value = String(value);
    chooseOther(other);
  }
}

function valueOf(name) {
  const control = form.elements[name];
  return control.type === "checkbox" ? control.checked : control.value;
}

async function fillBest() {
  const button = document.getElementById("best");
  const output = document.getElementById("best-status");
  const [words, undo] = output.children;
  button.disabled = true;
  output.hidden = false;
  undo.hidden = true;
  words.textContent = "Searching…";
  try {
    clearTimeout(timer);
    await ask();
    if (!spec) throw new Error("the form has no estimate yet");
    const found = await best(form.dataset.searchUrl, form.elements.csrfmiddlewaretoken.value, query(spec, cluster.value));
    const values = filled(found.best[0]);
    const before = Object.fromEntries(Object.keys(values).map((name) => [name, valueOf(name)]));
    words.textContent = why(found, stepS);
    put(values);
    undo.hidden = false;
    undo.onclick = () => {
      put(before);
      output.hidden = true;
      button.focus();
    };
  } catch (error) {
    words.textContent = failed("No layout was filled in", error.message);
  } finally {
    button.disabled = false;
  }
}

function put(values) {
  edited = true;
  for (const [name, value] of Object.entries(values)) fill(name, value);
  showPipeline();
  ask();
}

/** Shows the schedule only if there are several stages. */
function showPipeline() {
  document.getElementById("pipeline").hidden = valueOf("layout.pp") === "1";
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
  form.querySelector('[data-fold="parallelism"]').hidden = chosen; // all of its fields are chosen
  for (const holder of form.querySelectorAll(".folds [data-for^='layout.']")) holder.hidden = chosen;
  const micro = form.elements["train.micro_batches"];
  const hint = document.getElementById("h-train.micro_batches");
  hint.dataset.own ??= hint.textContent;
  micro.disabled = chosen;
  hint.textContent = chosen ? "Meshboard chooses the number of micro-batches together with the layout." : hint.dataset.own;
}

/** Asks for confirmation before it submits a job that does not fit. */
function confirmUnfit(event) {
  const allowed = form.elements.allow_unfit;
  if (!readiness?.confirm || event.submitter?.name === "kind" || (allowed && (allowed.type === "hidden" || allowed.checked))) return;
  event.preventDefault();
  const dialog = document.getElementById("unfit-dialog");
  document.getElementById("unfit-words").textContent = `${readiness.message} The job will probably run out of memory.`;
  document.getElementById("unfit-cancel").onclick = () => dialog.close();
  document.getElementById("unfit-submit").onclick = () => {
    dialog.close();
    if (allowed) allowed.checked = true;
    else form.append(el("input", { type: "hidden", name: "allow_unfit", value: "true" }));
    form.requestSubmit(document.getElementById("submit"));
  };
  dialog.showModal();
}

form.addEventListener("input", (event) => {
  edited = true;
  form.querySelector("input[type=hidden][name=allow_unfit]")?.remove(); // because it confirmed another draft
  if (event.target.name === "auto") showAuto();
  follow(event);
  showPipeline();
  askSoon();
});
form.addEventListener("submit", confirmUnfit);
// A degree that is also a choice is shown once.
form.addEventListener("change", ({ target }) => {
  if (target.dataset.other !== undefined && target.dataset.chosen === undefined) clearOther(target.dataset.other);
});
setUpOwnAccelerator(cluster, document.querySelector("[data-own-accelerator]"));
cluster.addEventListener("change", () => {
  edited = true;
  askSoon();
});
explainButtons(panel, document.getElementById("explain"), form.dataset.explainUrl, async (figure) => {
  if (!spec) await ask();
  return { spec, cluster: cluster.value, stage: stages[figure]?.stage ?? 0 };
});
form.elements["model.preset"].addEventListener("change", () => {
  showModel();
  askSoon();
});
document.getElementById("copy-curl").addEventListener("click", async () => {
  clearTimeout(timer);
  await ask(); // to include the latest change
  if (!spec) return;
  document.querySelector(".curl pre").textContent = curl();
  document.querySelector(".curl").open = true;
  const copied = await copyText(curl());
  document.getElementById("copied").textContent = copied
    ? "Copied. The command reads your REST token from $MESHBOARD_TOKEN."
    : "The browser does not allow copying. Select the text below.";
});
document.getElementById("best").addEventListener("click", fillBest);
setUpConfigImport(form, useModel);
setUpLayoutImport(form, useLayout);
readRanks(panel);
showPipeline();
showAuto();
showModel();
ask();
