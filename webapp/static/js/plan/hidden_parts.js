// Parts of a model without fields in the job form. Hidden inputs hold them.
import { integer } from "../format.js";

const known = (value) => typeof value === "number";
/** @type {Record<string, (part: any) => string>} */
const WORDS = {
  moe: ({ num_experts: experts }) => (known(experts) ? `a mixture of ${integer(experts)} experts` : "a mixture of experts"),
  mla: () => "latent attention",
  block: () => "layers that differ from the architecture",
  rope_scaling: ({ factor }) => (known(factor) ? `RoPE scaling by ${factor}` : "RoPE scaling"),
};

/** Return null for an empty or unreadable part. The plan reports unreadable parts. */
function read(text) {
  try {
    const part = JSON.parse(text || "null");
    return typeof part === "object" ? part : null;
  } catch {
    return null;
  }
}

/** List the parts. `getText(part)` returns the text of a hidden input. */
export function withParts(getText) {
  const parts = Object.entries(WORDS).flatMap(([name, words]) => {
    const part = read(getText(name));
    return part ? [words(part)] : [];
  });
  return parts.length > 0 ? `, and kept from the copied model: ${parts.join(", ")}` : "";
}
