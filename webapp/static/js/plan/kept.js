// Parts of a model that the submit form has no fields of: hidden, they stay as they came, right or wrong.
import { integer } from "../format.js";

const known = (value) => typeof value === "number";
const WORDS = {
  moe: ({ num_experts: experts }) => (known(experts) ? `a mixture of ${integer(experts)} experts` : "a mixture of experts"),
  mla: () => "latent attention",
  rope_scaling: ({ factor }) => (known(factor) ? `rotary positions stretched by ${factor}` : "stretched rotary positions"),
};

/** Null for what is none, or cannot be read: the plan's problems say so. */
function read(text) {
  try {
    const part = JSON.parse(text || "null");
    return typeof part === "object" ? part : null;
  } catch {
    return null;
  }
}

/** `textOf(part)`: the hidden field's text. */
export function withParts(textOf) {
  const told = Object.entries(WORDS).flatMap(([name, words]) => {
    const part = read(textOf(name));
    return part ? [words(part)] : [];
  });
  return told.length > 0 ? `, and as in what they are copied from: ${told.join(", ")}` : "";
}
