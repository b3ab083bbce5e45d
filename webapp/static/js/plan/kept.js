// Parts of a model that the job form has no fields for. Hidden inputs keep them.
import { integer } from "../format.js";

const known = (value) => typeof value === "number";
/** @type {Record<string, (part: any) => string>} */
const WORDS = {
  moe: ({ num_experts: experts }) => (known(experts) ? `a mixture of ${integer(experts)} experts` : "a mixture of experts"),
  mla: () => "latent attention",
  rope_scaling: ({ factor }) => (known(factor) ? `RoPE scaling by ${factor}` : "RoPE scaling"),
};

/** Returns null for an empty or unreadable part. The plan reports unreadable parts. */
function read(text) {
  try {
    const part = JSON.parse(text || "null");
    return typeof part === "object" ? part : null;
  } catch {
    return null;
  }
}

/** Lists the kept parts. `textOf(part)` returns the text of a hidden input. */
export function withParts(textOf) {
  const parts = Object.entries(WORDS).flatMap(([name, words]) => {
    const part = read(textOf(name));
    return part ? [words(part)] : [];
  });
  return parts.length > 0 ? `, and kept from the copied model: ${parts.join(", ")}` : "";
}
