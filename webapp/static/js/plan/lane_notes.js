// Notes below the figures of a layout in the Planner.
import { el, withCode } from "../dom.js";
import { duration, integer } from "../format.js";

/** A message names its field, so the field is added only if it does not. */
export function problemText({ field, message }) {
  return message.includes("`") || field === "request" ? withCode(message) : [el("code", {}, field), ": ", message];
}

/** The properties of unknown software that change the step time the most. */
export function assumptions(time) {
  if (!time.assumptions?.length) return [];
  const items = time.assumptions.map(({ words, ratio }) => el("li", {}, `${words}: ${ratio.toFixed(2)} × the step time`));
  return [el("p", { className: "note" }, "Unknown properties of the software with the largest effect:"), el("ul", {}, ...items)];
}

/** What the estimate leaves out if the spec has memory options. */
export function memoryNote(spec) {
  if (!spec?.memory) return [];
  return [el("p", { className: "note" }, "The memory methods change the memory only. Step time and traffic: AdamW on all weights, without offload.")];
}

/** The row of the time that an unaligned vocabulary costs. `line` makes the row. */
export function unaligned(found, line) {
  const name = "time lost to an unaligned vocabulary size";
  return found ? line(name, duration(found.spares_s), `per step. A vocabulary of ${integer(found.vocab_size)} avoids this cost.`) : line(name, "–");
}
