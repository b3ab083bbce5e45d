// Draws an estimate: figures, rank grid, traffic and memory, each picture with its table.
import { byId, el, svg, swatch, table } from "./dom.js";
import { bytes, count, exactBytes, parameters } from "./format.js";

const MOST_SQUARES = 1024;
const MEMORY_TOKENS = {
  parameters: "--series-0",
  gradients: "--series-1",
  optimizer: "--series-2",
  gathered: "--series-3",
  activations: "--series-4",
  logits: "--series-5",
};

export function drawPlan(estimate) {
  figures(estimate);
  byId("grid").replaceChildren(grid(estimate));
  byId("traffic").replaceChildren(...traffic(estimate));
  byId("memory").replaceChildren(...memory(estimate));
}

export function clearPlan() {
  for (const id of ["grid", "traffic", "memory"]) byId(id).replaceChildren(el("p", { class: "hint" }, "–"));
  byId("figures").replaceChildren();
}

function figures(estimate) {
  const { dp, pp, tp } = estimate.axes;
  const held = Math.max(...estimate.stages.map((s) => s.parameters));
  const rows = [
    ["ranks", `${count(estimate.world_size)}`, `dp ${dp} × pp ${pp} × tp ${tp}`],
    ["model", parameters(estimate.model_parameters), "parameters"],
    ["held per rank", parameters(held), "parameters at most"],
    ["tokens a step", count(estimate.tokens_per_step), `micro-batch ${estimate.micro_batch_size}`],
    ["peak memory", bytes(estimate.peak_memory_bytes), "a rank, estimate"],
  ];
  byId("figures").replaceChildren(...rows.map(([name, value, unit]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, unit)))));
}

function grid(estimate) {
  const { dp, pp, tp } = estimate.axes;
  if (estimate.world_size > MOST_SQUARES) {
    return el("p", { class: "hint" }, `${count(estimate.world_size)} ranks: too many to draw`);
  }
  const size = estimate.world_size > 128 ? 10 : 18;
  const step = size + 2;
  const width = pp * (tp * step + 10);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${dp * step}`, width, height: dp * step, role: "img",
    "aria-label": `${pp} stages of ${dp} by ${tp} ranks`,
  });
  for (let stage = 0; stage < pp; stage += 1) {
    for (let d = 0; d < dp; d += 1) {
      for (let t = 0; t < tp; t += 1) {
        const rank = (stage * dp + d) * tp + t;
        const square = svg("rect", {
          x: stage * (tp * step + 10) + t * step, y: d * step, width: size, height: size, rx: 3,
        }, svg("title", {}, `rank ${rank}: pp ${stage}, dp ${d}, tp ${t}`));
        square.style.fill = `var(--series-${stage % 16})`;
        picture.append(square);
      }
    }
  }
  return picture;
}

function traffic(estimate) {
  const axes = [...new Set(estimate.stages.flatMap((s) => Object.keys(s.step_bytes)))];
  if (!axes.length) return [el("p", { class: "hint" }, "One rank sends nothing.")];
  const most = Math.max(...estimate.stages.map((s) => sum(s.step_bytes)));
  const columns = [
    { title: "stage", cell: (r) => `${r.stage}` },
    { title: "collective", cell: (r) => r.op.replaceAll("_", "-") },
    { title: "axis", cell: (r) => el("span", {}, swatch(`--axis-${r.axis}`), r.axis) },
    { title: "calls", number: true, cell: (r) => count(r.count) },
    { title: "payload", number: true, cell: (r) => el("span", { title: exactBytes(r.payload_bytes) }, bytes(r.payload_bytes)) },
  ];
  const rows = estimate.stages.flatMap((s) => s.traffic.map((t) => ({ stage: s.stage, ...t })));
  return [
    ...estimate.stages.slice(0, 16).map((s) => bar(
      `stage ${s.stage}: ${bytes(sum(s.step_bytes))}`,
      axes.map((a) => [`--axis-${a}`, s.step_bytes[a] ?? 0, a]), most)),
    table(columns, rows.slice(0, 64), { caption: "collectives of one rank in one step" }),
  ];
}

function memory(estimate) {
  const most = estimate.peak_memory_bytes;
  const names = Object.keys(MEMORY_TOKENS);
  const columns = [
    { title: "component", cell: (n) => el("span", {}, swatch(MEMORY_TOKENS[n]), n) },
    ...estimate.stages.slice(0, 4).map((s) => ({
      title: `stage ${s.stage}`, number: true, cell: (n) => bytes(s.memory[n]),
    })),
  ];
  return [
    ...estimate.stages.slice(0, 16).map((s) => bar(
      `stage ${s.stage}: ${bytes(s.memory_bytes)}`, names.map((n) => [MEMORY_TOKENS[n], s.memory[n], n]), most)),
    table(columns, names, { caption: "memory by component" }),
  ];
}

function bar(label, parts, most) {
  const picture = svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", class: "bar", role: "img", "aria-label": label });
  let x = 0;
  for (const [token, size, name] of parts) {
    const width = most ? (size / most) * 1000 : 0;
    const part = svg("rect", { x, y: 0, width, height: 18 }, svg("title", {}, `${name}: ${bytes(size)}`));
    part.style.fill = `var(${token})`;
    picture.append(part);
    x += width;
  }
  return el("div", {}, el("div", { class: "hint" }, label), picture);
}

const sum = (byAxis) => Object.values(byAxis).reduce((a, b) => a + b, 0);
