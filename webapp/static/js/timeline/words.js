// Describes an event of a timeline.
import { byteRate, decimalBytes, duration, integer, opName } from "../format.js";
import { busFactor } from "../collectives.js";
import { transferred, waited } from "./step.js";

export function describeEvent(event, step) {
  const when = `rank ${event.rank} · ${duration(event.from)} into the step`;
  if (event.work !== undefined) {
    const part = event.micro >= 0 ? ` of micro-batch ${event.micro}` : "";
    const chunk = event.chunk >= 0 ? `, chunk ${event.chunk}` : "";
    return `${event.work}${part}${chunk} · ${duration(event.to - event.from)} · ${when}`;
  }
  const { axis, ranks } = step.groups[event.group];
  const peer = event.peer >= 0 ? ` ${event.op === "send" ? "to" : "from"} rank ${event.peer}` : ` over ${integer(ranks.length)} ranks`;
  const parts = [`${axis} ${opName(event.op)} ${event.sequence}${peer}`, event.bytes === null ? "bytes unknown" : decimalBytes(event.bytes)];
  const wait = waited(event);
  if (event.open) parts.push("end not recorded");
  else parts.push(duration(event.to - event.from));
  if (wait === null) parts.push("waiting time unknown");
  else if (event.last === event.rank) parts.push("last to arrive");
  else parts.push(`waited ${duration(wait)} for rank ${event.last}`);
  const took = transferred(event);
  if (took !== null && took > 0) {
    const factor = busFactor(event.op, event.op === "send" ? 2 : ranks.length);
    parts.push(`transfer ${duration(took)}${factor > 0 && event.bytes !== null ? ` at ${byteRate((factor * event.bytes) / took)} bus bandwidth` : ""}`);
  }
  if (!event.open) parts.push(event.blocked === null ? "exposed time unknown" : `exposed ${duration(event.blocked)}`);
  return [...parts, when].join(" · ");
}
