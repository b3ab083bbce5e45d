// The job page: telemetry into the store, the store onto the page, ten times a second at most.
import { Chart } from "./charts.js";
import { byId, el, pageData, swatch, table } from "./dom.js";
import { bytes, count, exactBytes, rate, seconds, time, zone } from "./format.js";
import { follow } from "./socket.js";
import { Store, collectives, fidelity } from "./store.js";

const REDRAW_MS = 200;
const SERIES = 16;
const ESCAPES = /\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|.)/g;

const data = pageData();
let job = data.job;
const store = new Store();
let paused = false;
let dirty = true;

const ranks = () => [...Array(Math.min(job.world_size, SERIES)).keys()];

const trafficChart = new Chart(byId("traffic-chart"), {
  series: ranks().map((rank) => ({ label: `rank ${rank}`, token: `--series-${rank}` })),
  data: trafficData,
  xLabel: `time (${zone()})`, yLabel: "payload bytes a second", yFormat: rate, xTime: true, yFromZero: true, yBinary: true,
});
const lossChart = new Chart(byId("loss-chart"), {
  series: [{ label: "training", token: "--series-0" }, { label: "validation", token: "--series-1", points: true }],
  data: lossData,
  xLabel: "step", yLabel: "loss (nats a token)", yFormat: (v) => v.toFixed(2),
});

function trafficData() {
  const windowS = Number(byId("window").value);
  const { x, series } = store.rates({ axis: byId("by-axis").value, op: byId("by-op").value, windowS, ranks: ranks() });
  return [x, ...ranks().map((rank) => series.get(rank) ?? [])];
}

function lossData() {
  const stride = Math.max(1, Math.ceil(store.losses.length / 1000));
  const validation = new Map(store.evals);
  const kept = store.losses.filter(([step], i) => i % stride === 0 || validation.has(step));
  const xs = kept.map(([step]) => step);
  return [xs, kept.map(([, loss]) => loss), xs.map((step) => validation.get(step) ?? null)];
}

function drawJob() {
  const { status } = job;
  byId("status").dataset.status = status;
  byId("status").textContent = status;
  const layout = job.spec.layout;
  const parts = [`dp ${layout.dp} × pp ${layout.pp} × tp ${layout.tp}`];
  if (layout.sequence_parallel) parts.push("sequence parallel");
  if (layout.zero) parts.push(`ZeRO-${layout.zero}`);
  parts.push(job.spec.model.preset ?? "custom model", job.host ? `on ${job.host}` : "no host yet", `attempt ${job.attempt}`, `id ${job.id}`);
  byId("subtitle").textContent = parts.join(" · ");
  byId("cancel").hidden = job.finished || status === "cancelling";
  byId("requeue").hidden = !["failed", "lost", "cancelled"].includes(status);
  byId("history").replaceChildren(...job.history.map((h) =>
    el("li", {}, el("span", { class: "badge", "data-status": h.status }, h.status), " ", el("time", { datetime: h.at }, time(h.at)), h.reason ? ` – ${h.reason}` : "")));
  drawNotice();
}

function drawNotice() {
  const notice = byId("notice");
  const exit = job.exit;
  const gaps = store.gaps.map((g) => el("p", {}, `Gap: ${g.text}.`));
  notice.className = "notice";
  const content = [];
  if (job.status === "queued") content.push(el("p", {}, `Waiting: ${job.wait_reason || "the scheduler has not looked yet"}`));
  if (job.status === "starting") content.push(el("p", {}, `Starting on ${job.host}: processes come up and load torch; the first step takes some seconds.`));
  if (job.status === "unreachable") {
    notice.classList.add("warn");
    content.push(el("p", {}, `${job.host} has not been heard of. Its ranks may well be training; nothing here is newer than the host's last word.`));
  }
  if (exit && job.finished && job.status !== "succeeded") {
    notice.classList.add(job.status === "cancelled" ? "warn" : "bad");
    content.push(el("p", {}, exit.reason));
    if (exit.log_tail.length) content.push(el("pre", {}, exit.log_tail.join("\n").replace(ESCAPES, "")));
  }
  notice.replaceChildren(...content, ...gaps);
  notice.hidden = notice.childElementCount === 0;
}

function drawProgress() {
  const steps = job.spec.train.steps;
  const done = store.progress?.step ?? job.exit?.summary?.steps ?? 0;
  byId("progress").max = steps;
  byId("progress").value = done;
  const speed = store.tokensPerSecond();
  const left = speed && !job.finished ? ((steps - done) * job.estimate.tokens_per_step) / speed : null;
  const loss = store.losses.at(-1)?.[1];
  const validation = store.evals.at(-1)?.[1];
  const rows = [
    ["step", `${count(done)}`, `of ${count(steps)}`],
    ["speed", speed ? count(speed) : "–", "tokens/s"],
    ["loss", loss?.toFixed(4) ?? "–", "nats a token"],
    ["validation", validation?.toFixed(4) ?? "–", "nats a token"],
    ["left", left === null ? "–" : seconds(left), job.finished ? "" : "about"],
  ];
  byId("figures").replaceChildren(...rows.map(([name, value, unit]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, unit)))));
  byId("phase").textContent = job.finished ? "" : { setup: "setting up", step: "training", eval: "validating", teardown: "ending" }[store.phases.get(0)] ?? "";
}

function drawFidelity() {
  const rows = fidelity(job.estimate, store.stepCells);
  if (!rows.length) {
    byId("fidelity").replaceChildren(el("p", { class: "hint" }, job.world_size === 1 ? "One rank sends nothing." : "The first finished step will fill this."));
    return;
  }
  const openRanks = byId("fidelity").querySelector("details")?.open ?? false;
  const flat = rows.flatMap((row) => [...row.ranks.values()].map((r) => ({ axis: row.axis, ...r })));
  const sums = rows.map((row) => total([...row.ranks.values()], { axis: row.axis }));
  const all = total(flat, { axis: "all axes", total: true });
  const done = [...store.stepCells.values()].map((s) => s.step);
  const [least, most] = [Math.min(...done), Math.max(...done)];
  const steps = least === most ? count(least) : `${count(least)} to ${count(most)}`;
  byId("fidelity").replaceChildren(
    table(fidelityColumns(), [...sums, all], { caption: "payload bytes of all ranks" }),
    el("p", { class: "hint" }, `${steps} steps on each of ${store.stepCells.size} ranks; payload bytes of phase step.${verdictWords()}`),
    el("details", { class: "reasons" }, el("summary", {}, "By rank"),
      table([{ title: "rank", cell: (r) => `${r.rank}` }, ...fidelityColumns()], flat, { caption: "by rank" })),
  );
  byId("fidelity").querySelector("details").open = openRanks;
  byId("fidelity").dataset.difference = String(all.measured - all.predicted);
}

function fidelityColumns() {
  return [
    { title: "axis", cell: (r) => (r.total ? r.axis : el("span", {}, swatch(`--axis-${r.axis}`), r.axis)) },
    { title: "predicted", number: true, cell: (r) => exactBytes(r.predicted) },
    { title: "measured", number: true, cell: (r) => exactBytes(r.measured) },
    { title: "difference", number: true, cell: (r) => exactBytes(r.measured - r.predicted), className: (r) => (r.measured === r.predicted ? "good" : "bad") },
    { title: "calls predicted", number: true, cell: (r) => count(r.predictedCalls) },
    { title: "calls measured", number: true, cell: (r) => count(r.measuredCalls), className: (r) => (r.measuredCalls === r.predictedCalls ? "" : "bad") },
  ];
}

function total(rows, extra) {
  const sum = { predicted: 0, measured: 0, predictedCalls: 0, measuredCalls: 0, ...extra };
  for (const row of rows) for (const name of ["predicted", "measured", "predictedCalls", "measuredCalls"]) sum[name] += row[name];
  return sum;
}

function verdictWords() {
  if (!store.verdicts.size) return "";
  const rows = [...store.verdicts.values()].flat();
  const wrong = rows.reduce((sum, r) => sum + Math.abs(r.measured_bytes - r.predicted_bytes), 0);
  const calls = rows.reduce((sum, r) => sum + Math.abs(r.measured_count - r.predicted_count), 0);
  return ` The run's own verdict over setup, steps and validations of ${store.verdicts.size} ranks: ${exactBytes(wrong)} and ${calls} calls apart.`;
}

function drawCollectives() {
  const rows = collectives(store.cells, data.busFactors);
  if (!rows.length) {
    byId("collectives").replaceChildren(el("p", { class: "hint" }, "None yet."));
    return;
  }
  const bandwidth = (v) => (v === null ? "–" : `${bytes(v)}/s`);
  byId("collectives").replaceChildren(table([
    { title: "collective", cell: (r) => r.op.replaceAll("_", "-") },
    { title: "axis", cell: (r) => el("span", {}, swatch(`--axis-${r.axis}`), r.axis) },
    { title: "group", number: true, cell: (r) => `${r.group_size} ranks` },
    { title: "calls", number: true, cell: (r) => count(r.count) },
    { title: "payload", number: true, cell: (r) => el("span", { title: exactBytes(r.payload_bytes) }, bytes(r.payload_bytes)) },
    { title: "mean time", number: true, cell: (r) => (r.mean === null ? "–" : seconds(r.mean)) },
    { title: "algorithm bandwidth", number: true, cell: (r) => bandwidth(r.algbw) },
    { title: "bus bandwidth", number: true, cell: (r) => bandwidth(r.busbw) },
  ], rows, { caption: "collectives by axis" }));
  offer("by-axis", rows.map((r) => r.axis));
  offer("by-op", rows.map((r) => r.op));
  const dropped = [...store.dropped.values()].reduce((a, b) => a + b, 0);
  if (dropped) byId("collectives").append(el("p", { class: "hint" }, `Times rest on fewer calls: ${count(dropped)} records did not fit the buffer. Counts and bytes are exact.`));
}

function offer(id, values) {
  const select = byId(id);
  for (const value of new Set(values)) {
    if (![...select.options].some((o) => o.value === value)) select.append(el("option", { value }, value.replaceAll("_", "-")));
  }
}

function drawLog() {
  const select = byId("log-rank");
  for (const rank of [...store.logs.keys()].sort((a, b) => a - b)) {
    if (![...select.options].some((o) => Number(o.value) === rank)) select.append(el("option", { value: rank }, rank < 0 ? "launcher" : `rank ${rank}`));
  }
  if (!select.dataset.touched && store.logs.has(0)) select.value = "0";
  const log = byId("log");
  log.textContent = (store.logs.get(Number(select.value)) ?? []).join("\n").replace(ESCAPES, "") || "Nothing yet.";
  if (byId("follow").checked) log.scrollTop = log.scrollHeight;
}

function draw() {
  dirty = false;
  drawProgress();
  drawFidelity();
  drawCollectives();
  drawLog();
  if (!paused) {
    trafficChart.update();
    lossChart.update();
  }
}

function takeJob(next) {
  if (next.attempt !== job.attempt) store.reset();
  job = next;
  if (job.exit?.summary && !store.stepCells.size) store.load(job.exit.summary);
  drawJob();
  dirty = true;
}

byId("cancel").addEventListener("click", () => byId("cancel-dialog").showModal());
byId("keep").addEventListener("click", () => byId("cancel-dialog").close());
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Go on" : "Pause";
});
for (const id of ["by-axis", "by-op", "window"]) byId(id).addEventListener("change", () => trafficChart.update());
byId("log-rank").addEventListener("change", () => {
  byId("log-rank").dataset.touched = "1";
  drawLog();
});
byId("copy-log").addEventListener("click", () => navigator.clipboard.writeText(byId("log").textContent));

takeJob(job);
draw();
setInterval(() => {
  if (dirty) draw();
}, REDRAW_MS);

follow(job.id, {
  entry: (batch) => {
    store.add(batch);
    dirty = true;
  },
  job: takeJob,
  gap: () => {
    store.gaps.push({ text: "older history was trimmed; totals are exact, the graph begins later" });
    drawNotice();
  },
  state: (state, words) => {
    const node = byId("connection");
    node.dataset.state = state;
    node.textContent = words;
  },
});
