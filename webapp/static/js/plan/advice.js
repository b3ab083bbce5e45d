// Finds layouts that are faster than an ended run.
import { el } from "../dom.js";
import { bytes, counted, duration } from "../format.js";
import { cell, rowHead, scrolling, th } from "../pictures/table.js";
import { failed, fetchPatiently } from "../refusal.js";

const panel = document.getElementById("advice");
const place = document.getElementById("advice-answer");
const button = panel.querySelector("button");
const percent = (share) => `${(100 * share).toFixed(1)}%`;

button.addEventListener("click", async () => {
  button.disabled = true;
  try {
    const answer = await fetchPatiently(panel.dataset.url, { headers: { Accept: "application/json" } });
    const told = await answer.json();
    place.replaceChildren(...(answer.ok ? shown(told) : told.errors.map(({ message }) => el("p", {}, message))));
  } catch (error) {
    place.replaceChildren(el("p", {}, failed("No result", error.message)));
  } finally {
    button.disabled = false;
  }
});

function shown(told) {
  const parts = told.parts.map((part) =>
    el(
      "tr",
      {},
      rowHead(null, part.part),
      cell(duration(part.predicted_s)),
      cell(measured(part)),
      cell(duration(part.apportioned_s)),
    ),
  );
  const note = `Measured on ${told.host}: median ${duration(told.step_s)} of ${counted(told.steps, "step")}. Predicted at submission: ${duration(told.predicted_s)}.`;
  const columns = [th("part"), th("predicted at submission", true), th("measured", true), th("breakdown", true)];
  return [
    el("p", {}, told.text),
    ...(told.options.length ? [options(told.options)] : []),
    ...(told.unsure.length ? [el("p", { className: "note" }, "Within the margin of error:"), options(told.unsure)] : []),
    el("p", { className: "note" }, note),
    scrolling(columns, parts),
    el("p", { className: "note" }, "Breakdown: the median step, split as in the traced steps (estimated if none was traced)."),
  ];
}

function measured(part) {
  if (part.measured_s !== null) return duration(part.measured_s);
  return part.measured_at_most_s === null ? "not measured" : `≤ ${duration(part.measured_at_most_s)}`;
}

function options(found) {
  const head = [th("change"), th("step time", true), th("time saved", true), th("memory", true), th("largest gain", true), th("part now", true), th("part then", true)];
  const rows = found.map((option) =>
    el(
      "tr",
      {},
      rowHead(null, option.change),
      cell(duration(option.step_s)),
      cell(percent(option.faster)),
      cell(bytes(option.memory_bytes)),
      cell(option.because.part),
      cell(duration(option.because.apportioned_s)),
      cell(duration(option.because.there_s)),
    ),
  );
  return scrolling(head, rows);
}
