// Measured step times, which a user enters for layouts of the Planner. They correct the step times of all layouts.
import { el } from "../dom.js";
import { whole } from "./file_import.js";

/**
 * Return the seconds in a text, or null for an empty text. Other text is returned as it is, and the server rejects it.
 * @param {string} text
 */
export function readSeconds(text) {
  const trimmed = text.trim();
  if (trimmed === "") return null;
  return Number.isFinite(Number(trimmed)) ? Number(trimmed) : trimmed;
}

/**
 * Return the measured steps of lanes, for a plan or a search.
 *
 * The batch and the sequence length are those of the time when the user entered the step.
 */
export function listMeasuredSteps(lanes) {
  return lanes
    .filter((lane) => lane.measured)
    .map(({ layout, micro_batches: microBatches, measured }) => ({ layout, micro_batches: microBatches, ...measured }));
}

/**
 * Return the input for the measured step of a lane.
 * @param {() => void} changed called after the user has changed the value
 */
export function makeMeasuredField(lane, { global_batch: batch, seq_len: length }, changed) {
  const input = el("input", { type: "text", inputMode: "decimal", value: String(lane.measured?.step_s ?? "") });
  input.title = "Seconds per step of a run with this layout. All step times use the value.";
  input.dataset.measured = "";
  input.dataset.name = "step_s";
  input.addEventListener("input", () => {
    const seconds = readSeconds(input.value);
    lane.measured = seconds === null ? null : { step_s: seconds, global_batch: whole(batch.value), seq_len: whole(length.value) };
    changed();
  });
  return el("label", { className: "wide" }, "measured step (s)", input);
}
