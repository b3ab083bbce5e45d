// The Planner: a shared base, up to four layouts side by side, and the search.
import { paretoChart } from "../charts/pareto.js";
import { copyText, el, embedded, stackedBar, withCode } from "../dom.js";
import { between, bytes, counted, decimalBytes, duration, integer, parameters, sureness, tokenRate } from "../format.js";
import { cell, scrolling, th } from "../pictures/table.js";
import { within } from "../pictures/time.js";
import { failed, fetchPatiently, words } from "../refusal.js";
import { setUpConfigImport, setUpLayoutImport } from "./file_import.js";
import { assumptions, memoryNote, problemText, unaligned } from "./lane_notes.js";
import { listMeasuredSteps, makeMeasuredField } from "./measured_steps.js";
import { chooseHardware, setUpOwnAccelerator } from "./own_accelerator.js";
import { putMemory, putSoftware, readMemory, readSoftware, showMemory, showSoftware } from "./software.js";

const MAX_LANES = 4;
const DELAY_MS = 150;
const SEARCH_DELAY_MS = 600; // after the last change of the base
const KEEPS_MEASURED = ["ranks", "global_batch", "seq_len"]; // a measured step of another batch has the same software
const base = document.getElementById("base");
const ownAccelerator = base.querySelector("[data-own-accelerator]");
const lanes = document.getElementById("lanes");
const results = document.getElementById("results");
const searchStatus = document.getElementById("search-status");
const DEGREES = ["dp", "pp", "tp", "cp", "ep"];
const schedules = embedded("schedules"); // {name: {label, chunks}}, the default first
const RECOMPUTES = ["none", "selective", "full"];
const FIRST = [
  { layout: { dp: 64, zero: 3 }, micro_batches: 8 },
  { layout: { dp: 16, tp: 4, sequence_parallel: true, zero: 1 }, micro_batches: 32 },
];

let removeChart = () => {}; // of the last search
let custom = null; // the model and the hidden training settings of a linked spec
let untouched = false; // whether the layouts are the page's own, which follow the base
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const whole = (text) => (/^\d+$/.test(text.trim()) ? Number(text) : text);
const csrf = () => base.elements.csrfmiddlewaretoken.value;

async function post(url, body) {
  const headers = { "Content-Type": "application/json", "X-CSRFToken": csrf() };
  const answer = await fetchPatiently(url, { method: "POST", body: JSON.stringify(body), headers });
  if (answer.redirected || answer.status === 403) throw new Error("you are logged out. Open the page again");
  const made = await answer.json();
  if (made.errors) throw new Error(words(made.errors));
  return made;
}

function makeSpec(lane) {
  const field = base.elements;
  const train = {
    ...(custom?.train ?? {}),
    global_batch: whole(field.global_batch.value),
    seq_len: whole(field.seq_len.value),
    precision: field.precision.value,
    micro_batches: lane.micro_batches,
  };
  const model = field.preset.value ? { preset: field.preset.value } : (custom?.model ?? {});
  const device = field.cluster.selectedOptions[0]?.dataset.device ?? "cuda";
  return { name: "planned layout", model, layout: lane.layout, train, ...readMemory(base), resources: { device, ...readSoftware(base) } };
}

/** The address of the job form with a layout. Jobs run Meshboard's trainer, so other software and methods are left out. */
function formAddress(lane) {
  const { memory: _, ...spec } = makeSpec(lane);
  const job = { ...spec, resources: { device: spec.resources.device } };
  return `${base.dataset.newUrl}?spec=${encodeURIComponent(JSON.stringify(job))}&cluster=${encodeURIComponent(base.elements.cluster.value)}`;
}

// --- lanes

const state = [];

function addLane(lane) {
  if (state.length >= MAX_LANES) return false;
  state.push({ layout: { ...lane.layout }, micro_batches: lane.micro_batches ?? 1, measured: lane.measured ?? null, plan: null });
  drawLanes();
  askAll();
  return true;
}

function drawLanes() {
  lanes.replaceChildren(...state.map(drawLane));
  document.getElementById("add").disabled = state.length >= MAX_LANES;
}

function drawLane(lane, index) {
  const panel = el("article", { className: "panel lane" });
  const title = el("h3", {}, `Layout ${"ABCD"[index]}`);
  const remove = el("button", { type: "button", className: "button quiet small", ariaLabel: `Remove layout ${"ABCD"[index]}` }, "Remove");
  remove.addEventListener("click", () => {
    state.splice(index, 1);
    untouched = false;
    drawLanes();
    if (lane.measured) askAll();
    remember();
  });
  const fields = el("div", { className: "degrees" });
  for (const axis of DEGREES) fields.append(numberField(lane, axis, lane.layout, axis, 1));
  fields.append(select(lane, "ZeRO", "zero", [0, 1, 2, 3], Number));
  fields.append(select(lane, "schedule", "schedule", Object.keys(schedules), String, "wide"));
  fields.append(numberField(lane, "chunks", lane.layout, "virtual_stages", 1));
  fields.append(numberField(lane, "micro-batches", lane, "micro_batches", 1));
  fields.append(select(lane, "recompute", "recompute", RECOMPUTES, String));
  const check = el("label", { className: "check wide" }, el("input", { type: "checkbox", checked: Boolean(lane.layout.sequence_parallel) }), " sequence parallel");
  check.firstChild.addEventListener("change", (event) => {
    lane.layout.sequence_parallel = event.target.checked;
    askEdited(lane);
  });
  fields.append(check, makeMeasuredField(lane, base.elements, enterMeasured));
  lane.body = el("div", {}, el("p", { className: "note" }, "Loading…"));
  const best = el("span", { className: "badge plain", hidden: true }, "most tokens/s per rank");
  best.dataset.tone = "good";
  best.dataset.most = "";
  panel.append(el("header", {}, title, best, remove), fields, lane.body);
  lane.panel = panel;
  if (lane.plan) showPlan(lane);
  return panel;
}

function numberField(lane, text, target, name, usual) {
  const input = el("input", { type: "text", inputMode: "numeric", value: String(target[name] ?? usual) });
  input.addEventListener("input", () => {
    target[name] = whole(input.value);
    askEdited(lane);
  });
  input.dataset.name = name;
  return el("label", {}, text, input);
}

function select(lane, text, name, values, read, className = "") {
  const options = values.map((v) => el("option", { value: String(v), selected: String(lane.layout[name] ?? values[0]) === String(v) }, schedules[v]?.label ?? String(v)));
  const box = el("select", {}, ...options);
  box.addEventListener("change", () => {
    lane.layout[name] = read(box.value);
    if (name === "schedule") {
      lane.layout.virtual_stages = schedules[box.value].chunks;
      lane.panel.querySelector('[data-name="virtual_stages"]').value = String(lane.layout.virtual_stages);
    }
    askEdited(lane);
  });
  return el("label", { className }, text, box);
}

/** Ask for the plan of an edited lane. Its measured step was that of another layout. */
function askEdited(lane) {
  untouched = false;
  if (lane.measured) forgetMeasured([lane]);
  else ask(lane);
}

function enterMeasured() {
  untouched = false;
  askAll();
}

function forgetMeasured(edited) {
  for (const lane of edited) {
    lane.measured = null;
    lane.panel.querySelector("[data-measured]").value = "";
  }
  askAll();
}

/** Ask for the plan of a lane after a pause. An old plan is faint until the new plan arrives. */
function ask(lane) {
  clearTimeout(lane.timer);
  lane.body.dataset.reading = "";
  lane.timer = setTimeout(() => cost(lane), DELAY_MS);
}

function askAll() {
  for (const lane of state) ask(lane);
}

async function cost(lane) {
  const mine = (lane.requests = (lane.requests ?? 0) + 1);
  remember();
  try {
    const body = { ...makeSpec(lane), measured_steps: listMeasuredSteps(state) };
    const plan = await post(`${base.dataset.planUrl}?cluster=${encodeURIComponent(base.elements.cluster.value)}`, body);
    if (mine !== lane.requests) return;
    lane.plan = plan;
  } catch (error) {
    if (mine !== lane.requests) return;
    lane.plan = { problems: [{ field: "request", message: error.message }], estimate: null };
  }
  showPlan(lane);
  for (const other of state) if (other !== lane && other.plan?.estimate) showFigures(other);
  markBest();
}

const AXES = ["tp", "cp", "ep", "pp", "dp", "world"];
const token = (name) => (AXES.includes(name) ? `--axis-${name}` : `--part-${name}`);

function showPlan(lane) {
  const { estimate, problems } = lane.plan;
  delete lane.body.dataset.reading;
  if (!estimate) {
    for (const input of lane.panel.querySelectorAll("[data-name]")) {
      const isOwn = input.dataset.measured === undefined || lane.measured;
      const isWrong = isOwn && problems.some((p) => p.field.split(".").at(-1) === input.dataset.name);
      if (isWrong) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
    const list = problems.map((p) => el("li", {}, ...problemText(p)));
    lane.body.replaceChildren(el("div", { className: "message" }, el("ul", {}, ...list)));
    lane.body.firstChild.dataset.tone = "bad";
    return;
  }
  for (const input of lane.panel.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  showFigures(lane);
}

/** Show the figures of a lane. All lanes have the same rows, so that values of one quantity are on one line. */
function showFigures(lane) {
  const { estimate } = lane.plan;
  const all = state.flatMap((one) => one.plan?.estimate ?? []);
  const isShown = (name) => all.some((one) => one.time.parts.some((part) => part.name === name && part.seconds > 0));
  const names = [...new Set(all.flatMap((one) => one.time.parts.map((part) => part.name)))].filter(isShown);
  const { time, cluster, vocab_size: vocabulary, padded_vocab_size: padded, aligned_vocabulary: aligned } = estimate;
  const parts = time.parts.map((p) => ({ token: token(p.name), value: p.seconds, title: `${p.name}: ${duration(p.seconds)}` }));
  const memory = `${bytes(estimate.peak_memory_bytes)} of ${bytes(cluster.memory_bytes)}`;
  const sent = Math.max(...estimate.stages.map((s) => Object.values(s.step_bytes).reduce((a, b) => a + b, 0)));
  const line = (name, value, title) => el("tr", { title }, el("th", { scope: "row" }, name), el("td", { className: "number" }, value));
  const isUnsure = estimate.fits ? estimate.tight : estimate.may_fit;
  const verdict = estimate.fits ? (isUnsure ? "might not fit" : "fits") : isUnsure ? "might fit" : "does not fit";
  const fits = el("span", { className: "badge plain" }, verdict);
  fits.dataset.tone = isUnsure ? "warn" : estimate.fits ? "good" : "bad";
  const rows = [
    line("ranks", integer(estimate.world_size)),
    line("step time", duration(time.step_s), "estimate"),
    line("step time range", within(time), time.interval.words),
    line("MFU", percent(time.mfu), "model FLOP/s divided by the peak FLOP/s of all ranks"),
    line("speed", tokenRate(time.tokens_per_s)),
    line("peak memory per rank", memory, "estimate"),
    line("memory range", between(bytes, estimate.peak_memory_bytes, estimate.memory_interval.share), estimate.memory_interval.words),
    ...(all.some((one) => one.host_memory_bytes) ? [line("CPU memory per rank", bytes(estimate.host_memory_bytes ?? 0), "estimate, of offloaded state")] : []),
    line("traffic per rank and step", decimalBytes(sent), "payload bytes per step of the busiest rank"),
    ...(all.some((one) => one.padded_vocab_size > one.vocab_size) ? [line("padded vocabulary", integer(padded), `from ${integer(vocabulary)}`)] : []),
    ...(all.some((one) => one.aligned_vocabulary) ? [unaligned(aligned, line)] : []),
    ...names.map((name) => line(AXES.includes(name) ? `${name} exposed` : name, partTime(time, name))),
  ];
  const use = el("a", { className: "button small", href: formAddress(lane) }, "Use this layout");
  const advice = (lane.plan.suggestions ?? []).map((n) => el("li", {}, el("b", {}, n.change), `: ${n.reason}`));
  const kind = el("span", { className: "badge plain" }, "estimate");
  kind.dataset.tone = "warn";
  lane.body.replaceChildren(
    el("p", { className: "actions" }, fits, kind),
    stackedBar(parts, "Step time breakdown"),
    el("table", { className: "compact" }, el("tbody", {}, ...rows)),
    el("p", { className: "note" }, `Time: ${time.interval.words}. Memory: ${estimate.memory_interval.words}.`),
    ...memoryNote(lane.plan.spec),
    ...assumptions(time),
    ...(advice.length ? [el("p", { className: "note" }, "Similar layouts that fit in memory:"), el("ul", {}, ...advice)] : []),
    el("p", {}, use),
  );
}

function partTime({ parts }, name) {
  const seconds = parts.find((part) => part.name === name)?.seconds ?? 0;
  return seconds > 0 ? duration(seconds) : "–";
}

function markBest() {
  const timed = state.filter((lane) => lane.plan?.estimate?.fits);
  const best = timed.length > 1 ? Math.max(...timed.map((lane) => lane.plan.estimate.time.tokens_per_s / lane.plan.estimate.world_size)) : null;
  for (const lane of state) {
    const made = lane.plan?.estimate;
    const isBest = Boolean(made?.fits) && made.time.tokens_per_s / made.world_size === best;
    lane.panel.dataset.best = String(isBest);
    lane.panel.querySelector("[data-most]").hidden = !isBest;
  }
}

// --- search

function fixedFields(text) {
  const fixed = {};
  for (const word of text.split(/[\s,]+/).filter(Boolean)) {
    const [name, value] = word.split("=");
    if (value === undefined) throw new Error(`write fixed values as ${name}=VALUE`);
    fixed[name] = /^\d+$/.test(value) ? Number(value) : value === "true" ? true : value === "false" ? false : value;
  }
  return fixed;
}

/** The body of a search for the base. Micro-batches are part of the search. */
function searchQuery(limit) {
  const spec = makeSpec({ layout: {}, micro_batches: 1 });
  const { micro_batches: _, ...train } = spec.train;
  return {
    spec: { ...spec, train },
    ranks: whole(base.elements.ranks.value),
    cluster: base.elements.cluster.value,
    max_micro_batch: whole(document.getElementById("s-micro").value),
    measured_steps: listMeasuredSteps(state),
    limit,
  };
}

async function search() {
  const button = document.getElementById("search");
  button.disabled = true;
  searchStatus.textContent = "Searching…";
  try {
    const body = { ...searchQuery(12), fixed: fixedFields(document.getElementById("s-fixed").value), runnable: document.getElementById("s-runnable").checked };
    showResults(await post(base.dataset.searchUrl, body));
  } catch (error) {
    searchStatus.textContent = failed("Search failed", error.message);
  } finally {
    button.disabled = false;
  }
}

function showResults(found) {
  const cut = found.complete ? "" : " The search stopped at its limit of layouts, so faster layouts can be missing. Enter fixed values, for example tp=8, or search with the command `python -m planner search`.";
  searchStatus.replaceChildren(...withCode(`${integer(found.considered)} of ${integer(found.total)} layouts estimated, ${integer(found.fitting)} fit in memory. The search took ${duration(found.seconds)}.${cut}`));
  const refused = Object.entries(found.refused).map(([reason, number]) => el("li", {}, `${integer(number)} layouts: ${reason}`));
  if (found.best.length === 0) {
    const hint = "Use more ranks, a smaller micro-batch, or hardware with more memory.";
    results.replaceChildren(el("div", { className: "empty" }, el("h2", {}, "No layout fits"), el("p", {}, hint)), el("ul", { className: "note" }, ...refused));
    return;
  }
  const head = [th("step time", true), th("MFU", true), th("memory", true), ...DEGREES.map((axis) => th(axis, true)), th("ZeRO", true), th("micro-batches", true), th("schedule"), th("recompute"), th("")];
  const table = scrolling(head, found.best.map(resultRow));
  table.classList.add("search-results");
  const near = found.neighbours.map((n) => el("tr", {}, el("th", { scope: "row" }, n.change), el("td", {}, n.reason)));
  const chart = el("div", { className: "pareto" });
  results.replaceChildren(
    table,
    el("p", { className: "note" }, "The search sorts layouts by the middle of the estimated step time range. If the ranges of two layouts overlap, the true order may be different."),
    el("details", {}, el("summary", {}, "Similar layouts"), scrolling([th("change to the first layout"), th("effect")], near)),
    ...(refused.length ? [el("details", {}, el("summary", {}, "Rejected layouts"), el("ul", { className: "note" }, ...refused))] : []),
    el("h3", {}, `Step time and memory: ${counted(found.pareto.length, "layout")} on the Pareto front`),
    chart,
  );
  removeChart();
  removeChart = paretoChart(chart, found.pareto, found.cluster.memory_bytes);
}

function resultRow(found) {
  const { layout, micro_batches: microBatches } = found;
  const lane = { layout, micro_batches: microBatches };
  const compare = el("button", { type: "button", className: "button small" }, "Compare");
  compare.addEventListener("click", () => {
    untouched = false;
    if (addLane(lane)) lanes.lastElementChild.scrollIntoView({ block: "nearest" });
    else searchStatus.textContent = `At most ${MAX_LANES} layouts can be compared. Remove one first.`;
  });
  const use = el("a", { className: "button small", href: formAddress(lane) }, "Use this layout");
  const schedule = layout.pp > 1 ? `${schedules[layout.schedule]?.label ?? layout.schedule}${layout.virtual_stages > 1 ? `, ${layout.virtual_stages} chunks` : ""}` : "–";
  return el(
    "tr",
    {},
    cell(`${duration(found.step_s)} ${sureness(found.interval.share)}`, within(found)),
    cell(percent(found.mfu)),
    cell(`${bytes(found.memory_bytes)} ${sureness(found.memory_interval.share)}`, between(bytes, found.memory_bytes, found.memory_interval.share)),
    ...DEGREES.map((axis) => cell(integer(layout[axis]))),
    cell(String(layout.zero)),
    cell(`${integer(microBatches)} of ${counted(found.micro_batch_size, "sequence")}`),
    el("td", {}, schedule),
    el("td", {}, layout.recompute),
    el("td", { className: "row-actions" }, use, " ", compare),
  );
}

// --- the state of the page, in its address

function remember() {
  const field = base.elements;
  const fields = Object.fromEntries(["preset", "cluster", "ranks", "global_batch", "seq_len", "precision"].map((name) => [name, field[name].value]));
  const saved = { base: fields, resources: readSoftware(base), ...readMemory(base), custom, lanes: state.map(({ layout, micro_batches, measured }) => ({ layout, micro_batches, measured })) };
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(saved))}`);
}

function recall() {
  let saved = null;
  try {
    saved = JSON.parse(decodeURIComponent(location.hash.slice(1)));
  } catch {
    saved = null;
  }
  if (saved?.spec) return fromSpec(saved.spec, saved.cluster);
  if (!saved?.lanes) {
    FIRST.forEach(addLane);
    untouched = true;
    return;
  }
  custom = saved.custom ?? null;
  putSoftware(base, saved.resources);
  putMemory(base, saved.memory);
  for (const [name, value] of Object.entries(saved.base)) if (base.elements[name]) base.elements[name].value = value;
  chooseHardware(base.elements.cluster, ownAccelerator, saved.base.cluster);
  showLinked();
  return saved.lanes.forEach(addLane);
}

function fromSpec(spec, cluster) {
  const { layout = {}, train = {}, model = {} } = spec;
  const { micro_batches: microBatches, global_batch: _batch, seq_len: _length, precision: _precision, ...hidden } = train;
  const { preset, ...sizes } = model;
  custom = { model, train: hidden };
  const field = base.elements;
  field.preset.value = Object.keys(sizes).length > 0 ? "" : (preset ?? "");
  putSoftware(base, spec.resources);
  putMemory(base, spec.memory);
  chooseHardware(field.cluster, ownAccelerator, cluster || (spec.resources?.device === "cuda" ? "h100" : "cpu"));
  for (const name of ["global_batch", "seq_len", "precision"]) if (train[name] !== undefined) field[name].value = train[name];
  field.ranks.value = String(["dp", "pp", "tp", "cp"].reduce((product, axis) => product * (layout[axis] ?? 1), 1));
  showLinked();
  addLane({ layout, micro_batches: microBatches });
}

/** Names the settings of a linked spec that have no field on this page. Choosing a model drops them. */
function showLinked() {
  const { preset, ...sizes } = custom?.model ?? {};
  const own = base.elements.preset.value === "";
  const hint = document.getElementById("linked-settings");
  if (own && custom?.imported) {
    base.elements.preset.selectedOptions[0].textContent = `imported · ${parameters(custom.imported)}`;
    hint.hidden = true;
    return;
  }
  if (own && preset) base.elements.preset.selectedOptions[0].textContent = `${preset} with other sizes`;
  const names = [...(own ? Object.keys(sizes) : []), ...Object.keys(custom?.train ?? {})];
  hint.hidden = names.length === 0;
  hint.textContent = `Settings without a field on this page: ${names.join(", ")}. To remove these settings, choose a model.`;
}

/** Plans an imported model, with sequences that are not longer than the model allows. */
function useModel({ model, parameters: imported }) {
  custom = { model, train: {}, imported };
  const { preset, seq_len: length } = base.elements;
  preset.value = "";
  if (Number(length.value) > model.max_seq_len) length.value = String(model.max_seq_len);
  showLinked();
  base.dispatchEvent(new Event("input"));
}

/** Adds a lane with an imported layout, and fills in the other settings of the file. */
function useLayout({ spec, ranks }) {
  const { micro_batches: microBatches, global_batch: _batch, seq_len: _length, precision: _precision, ...hidden } = spec.train;
  const { elements: field } = base;
  const preset = spec.model ? (spec.model.preset ?? "") : field.preset.value;
  custom = { model: spec.model ?? custom?.model ?? {}, train: hidden };
  field.preset.value = preset;
  if (spec.resources.stack) putSoftware(base, spec.resources);
  if (field.cluster.selectedOptions[0]?.dataset.device === "cpu") field.cluster.value = "h100";
  for (const name of ["global_batch", "seq_len", "precision"]) if (spec.train[name] !== undefined) field[name].value = spec.train[name];
  field.ranks.value = String(ranks);
  if (untouched) state.length = 0;
  untouched = false;
  if (state.length >= MAX_LANES) state.pop();
  for (const lane of state) lane.measured = null;
  showLinked();
  addLane({ layout: spec.layout, micro_batches: microBatches });
}

/** Replaces the page's own layouts by the fastest two for the base, so that they stay valid. */
async function followBase() {
  try {
    const found = await post(base.dataset.searchUrl, searchQuery(2));
    if (!untouched || found.best.length === 0) return;
    state.length = 0;
    for (const { layout, micro_batches: microBatches } of found.best) addLane({ layout, micro_batches: microBatches });
  } catch {
    // The lanes show what is wrong with the base.
  }
}

let baseTimer = null;
base.elements.preset.addEventListener("input", () => {
  custom = null;
  showLinked();
});
base.addEventListener("input", ({ target }) => {
  showSoftware(base);
  showMemory(base);
  if (KEEPS_MEASURED.includes(target.name)) askAll();
  else forgetMeasured(state);
  clearTimeout(baseTimer);
  if (untouched) baseTimer = setTimeout(followBase, SEARCH_DELAY_MS);
});
base.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("search").addEventListener("click", search);
showMemory(base);
setUpConfigImport(base, useModel);
setUpLayoutImport(base, useLayout);
setUpOwnAccelerator(base.elements.cluster, ownAccelerator);
document.getElementById("add").addEventListener("click", () => {
  untouched = false;
  addLane({ ...(state.at(-1) ?? FIRST[0]), measured: null });
});
document.getElementById("link").addEventListener("click", async () => {
  remember();
  document.getElementById("linked").textContent = (await copyText(location.href)) ? "Link copied." : "Copy the link from the address bar.";
});
recall();
