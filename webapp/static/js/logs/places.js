// In which collective each rank was when it was last heard, from what says so best. Pure.
import { bytes, duration, integer, opName } from "../format.js";

const FEW = 8; // ranks that are named

const ranksOf = (ranks) => {
  if (ranks.length <= FEW) return ranks.join(", ");
  return `${ranks.slice(0, FEW).join(", ")} and ${integer(ranks.length - FEW)} more`;
};

/** Remembers of standing and timeline items what each rank was last told to be in. */
export function foldPlace(places, item) {
  if (item.kind === "standing") {
    const waiting = item.groups.filter((one) => one.issued > one.ended);
    const one = waiting.sort((a, b) => (a.since ?? 0) - (b.since ?? 0))[0];
    if (!one) places.delete(item.rank);
    else {
      places.set(item.rank, { ...one.group, op: one.op, sequence: one.issued, bytes: one.payload_bytes, still: item.still, under: true });
    }
    return;
  }
  const { calls } = item;
  const last = calls.issued_us.reduce((best, at, i) => (best < 0 || at >= calls.issued_us[best] ? i : best), -1);
  if (last < 0) return;
  const group = item.groups[calls.group[last]];
  places.set(item.rank, { ...group, op: calls.op[last], sequence: calls.sequence[last], bytes: calls.payload_bytes[last], step: item.step, under: false });
}

/** The last collective that a rank was in, in words; "" where nothing tells. */
export function lastCollective(rank, places, cells) {
  const under = cells.filter((cell) => cell.count > cell.completed);
  const place = places.get(rank);
  if (place?.under || (place && under.length === 0)) {
    const what = `${opName(place.op ?? "")} number ${integer(place.sequence)} of its ${place.axis} group (ranks ${ranksOf(place.ranks)})`;
    const size = place.bytes ? `, ${bytes(place.bytes)}` : "";
    if (place.under) return `It was in ${what}${size}, where it had stood for ${duration(place.still)}.`;
    return `The last collective told of is ${what}${size}, in step ${integer(place.step)}.`;
  }
  if (under.length === 0) {
    const ended = cells.reduce((sum, cell) => sum + cell.count, 0);
    return ended > 0 ? `It was in no collective when it was last heard: the ${integer(ended)} that it had begun were over.` : "";
  }
  const words = under.map((cell) => `${opName(cell.op)} of ${cell.axis} over ${integer(cell.group_size)} ranks (its call number ${integer(cell.count)})`);
  return `Begun and not ended when it was last heard: ${words.join("; ")}.`;
}
