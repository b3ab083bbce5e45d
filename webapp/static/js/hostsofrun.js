// Of a run over several hosts: which ranks are where, how far clocks are off, and what crosses between hosts.
import { byAxis } from "./collectives.js";
import { el, swatch } from "./dom.js";
import { difference, exactBytes, integer, milliseconds } from "./format.js";

const NOTHING = { predicted: 0, measured: 0 };
const number = (text, extra = "") => el("td", { className: `number ${extra}`.trim() }, text);

/** Size and stride of an axis' groups: mirrors planner.facts.layout.axis_group (a test compares them). */
export function axisGroup(layout, axis) {
  const { dp = 1, pp = 1, tp = 1, cp = 1, ep = 1 } = layout;
  const replicas = dp * cp;
  return {
    tp: { size: tp, stride: 1 },
    cp: { size: cp, stride: tp },
    ep: { size: ep, stride: tp },
    dp: { size: replicas, stride: tp },
    pp: { size: pp, stride: tp * replicas },
    world: { size: tp * replicas * pp, stride: 1 },
  }[axis];
}

/** The ranks of some groups that have members on several hosts, and how many groups these are of how many. */
export function crossing({ size, stride }, members) {
  const home = new Map();
  for (const member of members) for (let i = 0; i < member.num_ranks; i += 1) home.set(member.first_rank + i, member.node);
  const ranks = new Set();
  let [groups, across] = [0, 0];
  if (size < 2) return { groups, across, ranks };
  for (const rank of home.keys()) {
    if (Math.floor(rank / stride) % size !== 0) continue; // not the first of its group
    const group = Array.from({ length: size }, (_, i) => rank + i * stride);
    groups += 1;
    if (new Set(group.map((one) => home.get(one))).size < 2) continue;
    across += 1;
    for (const one of group) ranks.add(one);
  }
  return { groups, across, ranks };
}

/** By axis that has groups of several ranks: what ranks of groups across hosts were to send, and sent. */
export function crossingRows(layout, members, compared) {
  const seen = new Map(compared.map((row) => [row.axis, row.ranks]));
  return ["dp", "pp", "cp", "ep", "tp", "world"]
    .map((axis) => {
      const found = crossing(axisGroup(layout, axis), members);
      const sums = { ...NOTHING };
      for (const own of seen.get(axis) ?? []) {
        if (!found.ranks.has(own.rank)) continue;
        for (const name of Object.keys(NOTHING)) sums[name] += own[name];
      }
      return { axis, groups: found.groups, across: found.across, ...sums };
    })
    .filter((row) => row.groups > 0)
    .sort((a, b) => byAxis(a.axis, b.axis));
}

function ranksOf(member) {
  const last = member.first_rank + member.num_ranks - 1;
  return last === member.first_rank ? `${last}` : `${member.first_rank}–${last}`;
}

function partOf(member, jobStatus) {
  if (!member.ended) return jobStatus;
  return member.reason ? `${member.outcome}: ${member.reason}` : member.outcome;
}

/** Its clock as it was, fast or slow: "+12.0 ms ± 0.1 ms", and "not measured" where it was not. */
export function clockWords(clock) {
  if (!clock) return "not measured";
  const off = clock.offset_s === 0 ? 0 : -clock.offset_s; // told is what is to be added to the host's
  return `${off < 0 ? "−" : "+"}${span(Math.abs(off))} ± ${milliseconds(clock.within_s)}`;
}

const span = (seconds) => (seconds < 1 ? milliseconds(seconds) : `${seconds.toFixed(2)} s`);

function replicaWords(layout, members) {
  const replicas = layout.dp_replicas ?? 1;
  if (replicas < 2) return "";
  const { size, stride } = axisGroup(layout, "dp");
  const shards = crossing({ size: size / replicas, stride }, members);
  const inside = shards.across === 0 ? "inside hosts" : `across hosts in ${integer(shards.across)} of ${integer(shards.groups)} groups`;
  return ` Of dp, ZeRO shards over ${integer(size / replicas)} ranks, ${inside}; ${integer(replicas)} replicas hold copies of them.`;
}

export function showHosts(panel, job, state, compared) {
  panel.hidden = job.members.length < 2;
  if (panel.hidden) return;
  panel.querySelector("#host-rows").replaceChildren(
    ...job.members.map((member) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, member.host),
        number(ranksOf(member)),
        el("td", {}, partOf(member, job.status)),
        number(clockWords(state.members.get(member.node)?.clock)),
      ),
    ),
  );
  const rows = job.estimate ? crossingRows(job.spec.layout, job.members, compared ?? []) : [];
  panel.querySelector("#crossing-rows").replaceChildren(
    ...rows.map((row) => {
      const off = row.measured - row.predicted;
      const inside = row.across === 0;
      const line = el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch(`--axis-${row.axis}`), row.axis),
        number(inside ? "none: inside a host" : `${integer(row.across)} of ${integer(row.groups)}`),
        number(inside ? "–" : exactBytes(row.predicted)),
        number(inside ? "–" : exactBytes(row.measured)),
        number(inside ? "–" : difference(off), off === 0 ? "zero" : "off"),
      );
      line.dataset.axis = row.axis;
      return line;
    }),
  );
  panel.querySelector("#crossing-note").textContent =
    `Payload bytes of the optimiser steps, summed over the ranks whose group has members on several hosts.${replicaWords(job.spec.layout, job.members)}`;
}
