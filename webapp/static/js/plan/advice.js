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
    const body = await answer.json();
    place.replaceChildren(...(answer.ok ? shown(body) : body.errors.map(({ message }) => el("p", {}, message))));
  } catch (error) {
    place.replaceChildren(el("p", {}, failed("No result", error.message)));
  } finally {
    button.disabled = false;
  }
});

function shown(body) {
  const parts = body.parts.map((part) =>
    el(
      "tr",
      {},
      rowHead(null, part.part),
      cell(duration(part.predicted_s)),
      cell(measured(part)),
      cell(duration(part.apportioned_s)),
    ),
  );
  const note = `The step time measured on ${body.host} is ${duration(body.step_s)}, the median of ${counted(body.steps, "step")}. The step time predicted at submission is ${duration(body.predicted_s)}.`;
  const columns = [th("part"), th("predicted at submission", true), th("measured", true), th("used for estimates", true)];
  return [
    el("p", {}, body.text),
    ...(body.options.length ? [el("h3", {}, "Faster layouts"), options(body.options)] : []),
    ...(body.unsure.length ? [el("h3", {}, "Layouts with gains within the margin of error"), options(body.unsure)] : []),
    el("h3", {}, "Step time of this run"),
    scrolling(columns, parts),
    el("p", { className: "note" }, note),
    el("p", { className: "note" }, "The estimates divide the median step time into parts, in the proportions of the traced steps. Without traced steps, the proportions are estimates."),
  ];
}

function measured(part) {
  if (part.measured_s !== null) return duration(part.measured_s);
  return part.measured_at_most_s === null ? "not measured" : `≤ ${duration(part.measured_at_most_s)}`;
}

function options(found) {
  const head = [th("change"), th("step time", true), th("time saved", true), th("memory", true), th("part of the step with the largest gain"), th("time of this part in this run", true), th("time of this part after the change", true)];
  const rows = found.map((option) =>
    el(
      "tr",
      {},
      rowHead(null, option.change),
      cell(duration(option.step_s)),
      cell(percent(option.faster)),
      cell(bytes(option.memory_bytes)),
      el("td", {}, option.because.part),
      cell(duration(option.because.apportioned_s)),
      cell(duration(option.because.there_s)),
    ),
  );
  return scrolling(head, rows);
}
