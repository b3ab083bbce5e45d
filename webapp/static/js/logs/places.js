// The last known collective of each rank. Pure.
import { counted, decimalBytes, duration, integer, opName } from "../format.js";

const FEW = 8; // listed ranks

const formatRanks = (ranks) => {
  if (ranks.length <= FEW) return ranks.join(", ");
  return `${ranks.slice(0, FEW).join(", ")} and ${integer(ranks.length - FEW)} more`;
};

/** Remember the last collective of each rank, from stall and timeline items. */
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

/** Describe the last collective of a rank, or return "" if unknown. */
export function lastCollective(rank, places, cells) {
  const under = cells.filter((cell) => cell.count > cell.completed);
  const place = places.get(rank);
  if (place?.under || (place && under.length === 0)) {
    const what = `${opName(place.op ?? "")} number ${integer(place.sequence)} of the ${place.axis} group (ranks ${formatRanks(place.ranks)})`;
    const size = place.bytes ? `, ${decimalBytes(place.bytes)}` : "";
    if (place.under) return `Stuck for ${duration(place.still)} in ${what}${size}.`;
    return `Last traced collective: ${what}${size}, in step ${integer(place.step)}.`;
  }
  if (under.length === 0) {
    const ended = cells.reduce((sum, cell) => sum + cell.count, 0);
    return ended > 0 ? `The rank was not in a collective when Meshboard last received its data. ${counted(ended, "call")} completed.` : "";
  }
  const words = under.map((cell) => `${opName(cell.op)} over ${cell.axis}, ${integer(cell.group_size)} ranks, call number ${integer(cell.count)}`);
  return `Unfinished collectives when Meshboard last received data from the rank: ${words.join("; ")}.`;
}
