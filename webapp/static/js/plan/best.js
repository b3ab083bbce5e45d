// "Fill the best layout": searches every layout on as many ranks as the form asks for and fills in the fastest.
import { duration, integer } from "../format.js";
import { fetchPatiently, words as refusal } from "../refusal.js";

const LIMIT = 1;

/** What is asked of the search for the spec of a form; micro-batches are searched too. */
export function query(spec, cluster) {
  const { layout = {}, train = {}, ...rest } = spec;
  const { micro_batches: _, ...kept } = train;
  const isOurs = (spec.resources?.stack ?? "ours") === "ours"; // of other software nothing runs here
  const ranks = ["dp", "pp", "tp", "cp"].reduce((product, axis) => product * (Number(layout[axis]) || 1), 1);
  return { spec: { ...rest, train: kept }, ranks, cluster: cluster || null, runnable: isOurs, limit: LIMIT };
}

/** What was there before may have taken less: it did not fit, or not surely. */
function beside(ratio) {
  if (ratio > 1.005) return `, ${ratio.toFixed(2)} times faster than before`;
  return ratio > 1 / 1.005 ? ", as fast as before" : `, ${(1 / ratio).toFixed(2)} times as long as before`;
}

/** Why the first of what was found is the one, in words; `before`: seconds of a step as the form had it, or null. */
export function why(found, before) {
  const [best] = found.best;
  const counted = `the fastest of ${integer(found.fitting)} that fit, those that barely do last, of ${integer(found.considered)} considered${found.complete ? "" : " in the time allowed"}`;
  const ratio = before / best.step_s;
  const gain = before === null ? "" : beside(ratio);
  const [next] = found.neighbours;
  return `${duration(best.step_s)} a step, predicted: ${counted}${gain}.${next ? ` Next to it, ${next.change}: ${next.reason}.` : ""}`;
}

/** Field values of the first layout found, by the form's names: all of it, as no part of it stays as it stood. */
export function filled({ layout, micro_batches: microBatches }) {
  const values = Object.fromEntries(Object.entries(layout).map(([name, value]) => [`layout.${name}`, value]));
  return { ...values, "train.micro_batches": microBatches };
}

/** Raises Error with the server's words where there is nothing to fill in. */
export async function best(url, token, asked) {
  const answer = await fetchPatiently(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRFToken": token },
    body: JSON.stringify(asked),
  });
  if (answer.redirected || answer.status === 403) throw new Error("you are logged out; open the page again");
  const told = await answer.json();
  if (told.errors) throw new Error(refusal(told.errors));
  if (told.best.length === 0) throw new Error(`of ${integer(told.considered)} layouts on ${integer(asked.ranks)} ranks none fits: try more ranks, or a smaller batch`);
  return told;
}
