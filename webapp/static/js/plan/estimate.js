// Shows the answer of the planner: one chart per figure, and its table.
import { el } from "../dom.js";
import { integer, parameters } from "../format.js";
import { chosenLayout } from "../pictures/chosen.js";
import { drawMatrix } from "../pictures/matrix.js";
import { memoryPicture } from "../pictures/memory.js";
import { rankGrid } from "../pictures/ranks.js";
import { drawSchedule } from "../pictures/schedule.js";
import { timePicture } from "../pictures/time.js";
import { trafficPicture } from "../pictures/traffic.js";

export function showEstimate(panel, plan) {
  const { estimate } = plan;
  const place = (name) => panel.querySelector(`[data-show="${name}"]`);
  const { dp, pp, cp, tp } = estimate.axes;
  place("world").textContent = `${integer(estimate.world_size)} ${estimate.world_size === 1 ? "rank" : "ranks"}`;
  const product = cp > 1 ? `dp ${dp} x pp ${pp} x cp ${cp} x tp ${tp}` : `dp ${dp} x pp ${pp} x tp ${tp}`;
  const { nodes, per_node: perNode, accelerator } = estimate.cluster;
  const where = nodes === 1 ? "one node" : `${integer(nodes)} nodes of ${perNode}`;
  place("product").textContent = `${product}, ${where}, ${accelerator}`;
  place("parameters").textContent = parameters(estimate.model_parameters);
  place("parameters").title = integer(estimate.model_parameters);
  const isMixture = estimate.active_parameters !== estimate.model_parameters;
  const notes = isMixture ? [`${parameters(estimate.active_parameters)} parameters active per token`] : [];
  if (estimate.padded_vocab_size > estimate.vocab_size) {
    notes.push(`vocabulary of ${integer(estimate.vocab_size)} padded to ${integer(estimate.padded_vocab_size)}`);
  }
  const padded = Math.max(...estimate.stages.map((stage) => stage.padded_share));
  if (padded >= 0.0005) notes.push(`ZeRO padding: ${(100 * padded).toFixed(1)}%`);
  place("active").textContent = notes.join(" · ");
  const perRank = Math.max(...estimate.stages.map((stage) => stage.parameters));
  place("per-rank").textContent = parameters(perRank);
  place("per-rank").title = integer(perRank);
  place("micro-batch").textContent = integer(estimate.micro_batch_size);
  place("micro-batch-words").textContent = estimate.micro_batch_size === 1 ? "sequence" : "sequences";
  show(panel, "chosen", plan.chosen, chosenLayout);
  place("time").replaceChildren(...timePicture(estimate));
  place("memory").replaceChildren(...memoryPicture(estimate, plan.suggestions));
  place("traffic").replaceChildren(...trafficPicture(estimate));
  kind(panel, "traffic", estimate.exact_traffic ? "exact" : "estimate", estimate.exact_traffic ? "good" : "warn");
  show(panel, "schedule", plan.timeline, (timeline) => drawSchedule(timeline));
  place("ranks").replaceChildren(...rankGrid(estimate));
  show(panel, "matrix", estimate.world_size > 1 ? plan.matrix : null, (matrix) => drawMatrix(matrix));
}

function kind(panel, section, text, tone) {
  const badge = panel.querySelector(`[data-section="${section}"] [data-kind]`);
  badge.textContent = text;
  badge.dataset.tone = tone;
}

/** Shows a section that only some layouts have. */
function show(panel, name, data, draw) {
  const section = panel.querySelector(`[data-section="${name}"]`);
  section.hidden = !data;
  const place = section.querySelector(`[data-show="${name}"]`);
  place.replaceChildren(...(data ? draw(data) : [el("p", {}, "")]));
}
