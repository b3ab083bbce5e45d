// The submit page: form fields from a table, a spec from the fields, an answer from the server at each change.
import { byId, el, pageData } from "./dom.js";
import { parameters } from "./format.js";
import { clearPlan, drawPlan } from "./plan.js";

const DEBOUNCE_MS = 120;
const data = pageData();
const form = byId("job-form");

const LAYOUT = [
  ["layout.dp", "Data parallel (dp)", [1, 2, 4, 8], "int"],
  ["layout.pp", "Pipeline stages (pp)", [1, 2, 4, 8], "int"],
  ["layout.tp", "Tensor parallel (tp)", [1, 2, 4, 8], "int"],
  ["layout.zero", "ZeRO stage", [0, 1, 2, 3], "int"],
  ["layout.sequence_parallel", "Sequence parallel", [false, true], "bool"],
  ["layout.schedule", "Pipeline schedule", ["1f1b", "gpipe"], "text"],
];
const TRAIN = [
  ["train.global_batch", "Batch, sequences", "int", 8],
  ["train.micro_batches", "Micro-batches a step", "int", 2],
  ["train.seq_len", "Sequence, tokens", "int", 128],
  ["train.steps", "Steps", "int", 200],
  ["train.learning_rate", "Learning rate", "float", 0.001],
  ["train.warmup_steps", "Warm-up, steps", "int", 10],
  ["train.grad_clip", "Clip norm, 0 is off", "float", 1],
  ["train.weight_decay", "Weight decay", "float", 0.1],
  ["train.eval_every", "Validate each, steps", "int", 50],
  ["train.seed", "Seed", "int", 1234],
  ["train.precision", "Precision", ["fp32", "bf16"], "fp32"],
  ["resources.device", "Device", ["cpu", "cuda"], "cpu"],
  ["train.data", "Data: stdlib, or a path below the data root", "text", "stdlib"],
];
const SIZES = ["num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size", "max_seq_len"];
const NAMES = { false: "off", true: "on", "1f1b": "1F1B", gpipe: "GPipe" };

const start = data.spec ?? {};
const given = (field) => field.split(".").reduce((value, part) => value?.[part], start);

function input(field, label, type, value) {
  const id = `f-${field.replaceAll(".", "-")}`;
  const control = Array.isArray(type)
    ? el("select", { id, "data-field": field, "data-type": "text" }, ...type.map((o) => el("option", { value: o }, o)))
    : el("input", { id, "data-field": field, "data-type": type, inputmode: type === "int" ? "numeric" : type === "float" ? "decimal" : "text", autocomplete: "off" });
  control.value = given(field) ?? value;
  const wide = field === "train.data" ? " wide" : "";
  return el("div", { class: `field${wide}`, "data-for": field }, el("label", { for: id }, label), control);
}

function segments(field, label, options, type) {
  const chosen = given(field) ?? (field === "layout.schedule" ? "1f1b" : field === "layout.dp" || field === "layout.tp" ? 2 : options[0]);
  const radios = options.map((option) => {
    const radio = el("input", { type: "radio", name: field, value: String(option), "data-field": field, "data-type": type });
    radio.checked = option === chosen;
    return el("label", {}, radio, NAMES[option] ?? String(option));
  });
  return el("div", { class: "field", "data-for": field, role: "radiogroup", "aria-label": label },
    el("span", { class: "label" }, label), el("div", { class: "segments" }, ...radios));
}

function buildForm() {
  const presets = byId("f-preset");
  presets.append(...data.presets.map((p) => el("option", { value: p.name }, `${p.name}: ${parameters(p.parameters)} parameters`)));
  presets.value = given("model.preset") ?? data.presets[0].name;
  byId("f-name").value = given("name") ?? "my first run";
  byId("layout-fields").append(...LAYOUT.map((f) => segments(...f)));
  byId("train-fields").append(...TRAIN.map((f) => input(...f)));
  byId("size-fields").append(...SIZES.map((s) => input(`model.${s}`, s.replaceAll("_", " "), "int", "")));
  if (start.model && !given("model.preset")) byId("sizes").open = true;
  else fillSizes();
}

function preset() {
  return data.presets.find((p) => p.name === byId("f-preset").value);
}

function fillSizes() {
  for (const size of SIZES) byId(`f-model-${size}`).value = preset().model[size];
}

function value(control) {
  const text = control.value.trim();
  if (control.dataset.type === "bool") return text === "true";
  // What is no number goes to the server as it is: the server says what is wrong with it.
  if (control.dataset.type === "int") return /^-?\d{1,15}$/.test(text) ? Number(text) : text;
  if (control.dataset.type === "float") return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  return control.value;
}

function spec() {
  const made = { model: {}, layout: {}, train: {}, resources: {} };
  for (const control of form.querySelectorAll("[data-field]")) {
    if (control.type === "radio" && !control.checked) continue;
    const [group, name] = control.dataset.field.split(".");
    if (name) made[group][name] = value(control);
    else made[group] = control.value;
  }
  const base = preset().model;
  made.model = { preset: base.preset, ...Object.fromEntries(SIZES.filter((s) => made.model[s] !== base[s]).map((s) => [s, made.model[s]])) };
  return made;
}

function show(answer) {
  const { estimate, problems, choices } = answer;
  byId("preset-hint").textContent = preset().description;
  showProblems(problems);
  showChoices(choices);
  if (estimate) drawPlan(estimate);
  else clearPlan();
  byId("submit").disabled = problems.length > 0;
  byId("product").textContent = estimate ? `${estimate.world_size} ranks` : "";
}

function showProblems(problems) {
  for (const node of form.querySelectorAll(".field")) {
    node.classList.remove("wrong");
    node.querySelector(":scope > .problem")?.remove();
  }
  for (const { field, message } of problems) {
    const node = form.querySelector(`.field[data-for="${CSS.escape(field)}"]`);
    node?.classList.add("wrong");
    node?.append(el("span", { class: "problem" }, message));
  }
  byId("problems-card").hidden = problems.length === 0;
  byId("problems").replaceChildren(...problems.map((p) => el("li", {}, `${p.field}: ${p.message}`)));
}

function showChoices(choices) {
  for (const [field, label] of LAYOUT) {
    const node = form.querySelector(`.field[data-for="${field}"]`);
    const impossible = choices[field.split(".")[1]] ?? {};
    for (const radio of node.querySelectorAll("input")) {
      const reason = impossible[radio.value];
      radio.disabled = reason !== undefined && !radio.checked;
      radio.parentElement.title = reason ?? "";
    }
    node.querySelector(".reasons")?.remove();
    const reasons = Object.entries(impossible);
    if (!reasons.length) continue;
    node.append(el("details", { class: "reasons" },
      el("summary", {}, `${reasons.length} not possible: why`),
      el("ul", {}, ...reasons.map(([option, reason]) => el("li", {}, `${NAMES[option] ?? option}: ${reason}`)))));
    node.querySelector(".reasons").setAttribute("aria-label", `${label}: options not possible`);
  }
}

let timer = null;
let latest = 0;

async function ask() {
  const mine = ++latest;
  const body = JSON.stringify(spec());
  const token = form.querySelector("[name=csrfmiddlewaretoken]").value;
  try {
    const response = await fetch(form.dataset.planUrl, {
      method: "POST", body, headers: { "Content-Type": "application/json", "X-CSRFToken": token },
    });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const answer = await response.json();
    if (mine !== latest) return;
    byId("plan-state").textContent = "";
    show(answer);
  } catch (error) {
    if (mine === latest) byId("plan-state").textContent = `cannot be worked out now: ${error.message}`;
  }
}

function changed(event) {
  if (event.target.id === "f-preset") fillSizes();
  clearTimeout(timer);
  timer = setTimeout(ask, DEBOUNCE_MS);
}

function curl() {
  return [
    `curl -X POST ${location.origin}/api/v1/jobs \\`,
    `  -H "Authorization: Token $MESHBOARD_TOKEN" \\`,
    `  -H "Content-Type: application/json" \\`,
    `  -d '${JSON.stringify(spec()).replaceAll("'", "'\\''")}'`,
  ].join("\n");
}

buildForm();
if (data.problems.length) showProblems(data.problems);
form.addEventListener("input", changed);
form.addEventListener("submit", () => {
  form.elements.spec.value = JSON.stringify(spec());
});
byId("copy-curl").addEventListener("click", async () => {
  await navigator.clipboard.writeText(curl());
  byId("copied").textContent = "copied; put your token into MESHBOARD_TOKEN";
});
ask();
