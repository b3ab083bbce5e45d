// Planned memory per stage as a bar next to the device memory, with a table of parts.
import { el } from "../dom.js";
import { between, bytes, exactBytes } from "../format.js";
import { cell, columns, rowHead, scrolling, stageHead, th } from "./table.js";

const ORDER = ["parameters", "gradients", "optimizer", "gathered", "activations", "logits", "working", "buffers", "copies", "allowance"];
/** Return the names of all memory parts, in display order. */
export function memoryNames(memories) {
  const names = new Set(memories.flatMap((memory) => Object.keys(memory).filter((name) => memory[name] > 0)));
  return [...ORDER.filter((name) => names.delete(name)), ...names];
}

const token = (name) => `--series-${ORDER.indexOf(name)}`;

/**
 * @param {Estimate} estimate
 */
export function memoryPicture(estimate, suggestions) {
  const { stages, cluster, memory_interval: sure } = estimate;
  const shown = columns(stages);
  const names = memoryNames(stages.map((s) => s.memory));
  const most = Math.max(cluster.memory_bytes, ...stages.map((s) => s.memory_bytes));
  const bars = shown.map((s) => el("div", { className: "memory-line" }, label(s, stages), bar(s, names, cluster, most)));
  const rows = names.map((name) =>
    el("tr", {}, rowHead(token(name), name), ...shown.map((s) => cell(bytes(s.memory[name] ?? 0), exactBytes(s.memory[name] ?? 0)))),
  );
  rows.push(el("tr", {}, rowHead(null, "total"), ...shown.map((s) => cell(bytes(s.memory_bytes), exactBytes(s.memory_bytes)))));
  return [
    verdict(estimate, suggestions),
    ...bars,
    scrolling([th("component"), ...stageHead(shown, stages)], rows),
    el("p", { className: "note" }, "The table shows the memory at the peak of a step. The allowance is memory for the device context and for fragmentation."),
    el("p", { className: "note" }, `Range of the predicted memory on the rank with the most memory: ${between(bytes, estimate.peak_memory_bytes, sure.share)}, ${sure.words}.`),
  ];
}

const label = (stage, all) => el("span", { className: "memory-label" }, all.length > 1 ? `stage ${stage.stage}` : "per rank");

function bar(stage, names, cluster, most) {
  const title = `${bytes(stage.memory_bytes)} of ${bytes(cluster.memory_bytes)}`;
  const line = el("div", { className: "bar memory-bar", role: "img", ariaLabel: title, title });
  for (const name of names) {
    const value = stage.memory[name] ?? 0;
    if (value <= 0) continue;
    const part = el("span", { title: `${name}: ${bytes(value)}` });
    part.style.width = `${(100 * value) / most}%`;
    part.style.setProperty("--swatch", `var(${token(name)})`);
    line.append(part);
  }
  const limit = el("i", { className: "capacity", title: `${cluster.accelerator}: ${bytes(cluster.memory_bytes)}` });
  limit.style.left = `${(100 * cluster.memory_bytes) / most}%`;
  line.append(limit);
  return line;
}

/** Return the free share of the device memory, rounded down. */
export function freeShare({ cluster, peak_memory_bytes: peak }) {
  return `${Math.floor(100 * (1 - peak / cluster.memory_bytes))}%`;
}

/**
 * Describe the fit: {text, tone}.
 * @param {Estimate} estimate
 */
export function fitting(estimate, room = "") {
  const [fits, free] = [`fits${room && ` ${room}`}`, `${freeShare(estimate)} free`];
  return estimate.tight
    ? { text: `${fits}, ${free} (less than the margin of error)`, tone: "warn" }
    : { text: `${fits}, ${free}`, tone: "good" };
}

function verdict(estimate, suggestions) {
  const { cluster, peak_memory_bytes: peak } = estimate;
  const has = `${bytes(peak)} of ${bytes(cluster.memory_bytes)}`;
  if (estimate.fits) {
    return el("p", { className: "verdict" }, el("b", {}, has), ` on the rank with the most memory: ${fitting(estimate).text}`);
  }
  const box = el("div", { className: "message", role: "status" }, el("p", {}, el("b", {}, `Needs ${has}.`)));
  box.dataset.tone = "bad";
  const fits = suggestions ?? [];
  if (fits.length === 0) {
    box.append(el("p", {}, "No layout that differs in one setting fits. Search for other layouts in the Planner."));
    return box;
  }
  box.append(el("p", {}, "With one of these changes, the layout fits in memory:"));
  box.append(el("ul", {}, ...fits.map((n) => el("li", {}, el("b", {}, n.change), `: ${n.reason}`))));
  return box;
}
