// "Use fastest layout": searches all layouts on the number of ranks of the form, and fills in the fastest.
import { duration, integer } from "../format.js";
import { fetchPatiently, words as refusal } from "../refusal.js";

const LIMIT = 1;

/** Return the search request for the spec of a form. The search also covers micro-batches. */
export function query(spec, cluster) {
  const { layout = {}, train = {}, ...rest } = spec;
  const { micro_batches: _, ...settings } = train;
  const isOurs = (spec.resources?.stack ?? "ours") === "ours"; // other software cannot run here
  const ranks = ["dp", "pp", "tp", "cp"].reduce((product, axis) => product * (Number(layout[axis]) || 1), 1);
  return { spec: { ...rest, train: settings }, ranks, cluster: cluster || null, runnable: isOurs, limit: LIMIT };
}

/** Compare with the layout of the form, which may be faster if it does not fit. */
function compared(ratio) {
  if (ratio > 1.005) return ` This layout is ${ratio.toFixed(2)} times as fast as the layout in the form.`;
  return ratio > 1 / 1.005 ? " This layout is as fast as the layout in the form." : ` The layout in the form is ${(1 / ratio).toFixed(2)} times as fast as this layout.`;
}

/**
 * Explain the fastest layout. `before` is the step time of the form's layout, or null.
 * @param {SearchResult} found
 * @param {number | null} before
 */
export function why(found, before) {
  const [best] = found.best;
  const rank = `Fastest of ${integer(found.fitting)} layouts that fit (${integer(found.considered)} ${found.complete ? "" : `of ${integer(found.total)} `}searched).`;
  const gain = before === null ? "" : compared(before / best.step_s);
  const [next] = found.neighbours;
  return `Predicted step time ${duration(best.step_s)}. ${rank}${gain}${next ? ` Next best, ${next.change}: ${next.reason}.` : ""}`;
}

/** Return the form values of the fastest layout. They replace the whole layout of the form. */
export function filled({ layout, micro_batches: microBatches }) {
  const values = Object.fromEntries(Object.entries(layout).map(([name, value]) => [`layout.${name}`, value]));
  return { ...values, "train.micro_batches": microBatches };
}

/** Search. Throw an Error with the message of the server if no layout is found. */
export async function best(url, token, search) {
  const answer = await fetchPatiently(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRFToken": token },
    body: JSON.stringify(search),
  });
  if (answer.redirected || answer.status === 403) throw new Error("you are logged out");
  const found = await answer.json();
  if (found.errors) throw new Error(refusal(found.errors));
  if (found.best.length === 0) throw new Error(`None of ${integer(found.considered)} layouts on ${integer(search.ranks)} ranks fits. Use more ranks or a smaller batch`);
  return found;
}
