// Hosts of a run on several hosts: ranks, clocks, and traffic between hosts and inside hosts.
import { byAxis } from "../collectives.js";
import { el, swatch } from "../dom.js";
import { difference, exactBytes, integer, milliseconds } from "../format.js";
import { refill } from "../refill.js";

const NOTHING = { predicted: 0, measured: 0 };
const number = (text, extra = "") => el("td", { className: `number ${extra}`.trim() }, text);

/**
 * Return size and stride of the groups of an axis. Mirrors planner.facts.layout.get_axis_group (a test compares both).
 * @param {Layout} layout
 * @param {string} axis
 */
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

/** Return the number of groups, the number that span hosts, and the ranks of those. */
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

/**
 * Return the groups of a layout, {axis, level, size, stride}. Mirrors planner.facts.layout.get_levels (a test compares both).
 * @param {Layout} layout
 */
export function levels(layout) {
  const { ep = 1, tp = 1, dp_replicas: copies = 1 } = layout;
  const dp = axisGroup(layout, "dp");
  const split = [{ level: "", ...dp }];
  if (copies > 1) {
    const size = dp.size / copies;
    split.splice(0, 1, { level: "shards", size, stride: tp }, { level: "replicas", size: copies, stride: tp * size });
  } else if (ep > 1) {
    split.splice(0, 1, { level: "shared", ...dp }, { level: "experts", size: dp.size / ep, stride: tp * ep });
  }
  const others = ["pp", "cp", "ep", "tp", "world"].map((axis) => ({ axis, level: "", ...axisGroup(layout, axis) }));
  return [...split.map((one) => ({ axis: "dp", ...one })), ...others].filter(({ size }) => size > 1);
}

/**
 * Return a function that finds the level of a row or cell. Mirrors planner.facts.layout.get_level_name.
 * @param {Layout} layout
 */
export function levelIn(layout) {
  const { ep = 1, dp_replicas: copies = 1 } = layout;
  return ({ axis, op, group_size: size }) => {
    if (axis !== "dp") return "";
    if (copies > 1) return op === "all_reduce" ? "replicas" : "shards";
    if (ep > 1) return size * ep === axisGroup(layout, "dp").size ? "experts" : "shared";
    return "";
  };
}

/** Return predicted and measured traffic by level, between hosts and inside hosts. */
export function crossingRows(layout, members, compared) {
  const seen = new Map(compared.map((row) => [`${row.axis} ${row.level}`, row.ranks]));
  return levels(layout)
    .map(({ axis, level, ...group }) => {
      const found = crossing(group, members);
      const sums = { across: { ...NOTHING }, inside: { ...NOTHING } };
      for (const own of seen.get(`${axis} ${level}`) ?? []) {
        const sum = sums[found.ranks.has(own.rank) ? "across" : "inside"];
        for (const name of Object.keys(NOTHING)) sum[name] += own[name];
      }
      return { axis, level, groups: found.groups, groupsAcross: found.across, ...sums };
    })
    .sort((a, b) => byAxis(a.axis, b.axis));
}

function formatRanks(member) {
  const last = member.first_rank + member.num_ranks - 1;
  return last === member.first_rank ? `${last}` : `${member.first_rank}–${last}`;
}

function describePart(member, jobStatus) {
  if (member.silent) return "no contact";
  if (!member.ended) return jobStatus === "unreachable" ? "running" : jobStatus;
  return member.reason ? `${member.outcome}: ${member.reason}` : member.outcome;
}

/** Describe a clock: "+12.0 ms ±0.1 ms" is fast. */
export function clockWords(clock) {
  if (!clock) return "not measured";
  const off = clock.offset_s === 0 ? 0 : -clock.offset_s; // `offset_s` is the correction of the host's clock
  return `${off < 0 ? "−" : "+"}${span(Math.abs(off))} ±${milliseconds(clock.within_s)}`;
}

const span = (seconds) => (seconds < 1 ? milliseconds(seconds) : `${seconds.toFixed(2)} s`);

function passed({ predicted, measured }, isNone) {
  if (isNone) return [number("–"), number("–"), number("–")];
  const off = measured - predicted;
  return [number(exactBytes(predicted)), number(exactBytes(measured)), number(difference(off), off === 0 ? "zero" : "off")];
}

/** Show the hosts. `comparedBy(getLevel)` returns predicted and measured traffic by axis and level. */
export function showHosts(panel, job, state, comparedBy) {
  panel.hidden = job.members.length < 2;
  if (panel.hidden) return;
  refill(
    panel.querySelector("#host-rows"),
    ...job.members.map((member) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, member.host),
        number(formatRanks(member)),
        el("td", {}, describePart(member, job.status)),
        number(clockWords(state.members.get(member.node)?.clock)),
      ),
    ),
  );
  const { layout } = job.spec;
  panel.querySelector("[data-crossing]").hidden = !job.estimate.stages; // external runs and scripts have no prediction
  const rows = job.estimate.stages ? crossingRows(layout, job.members, comparedBy(levelIn(layout))) : [];
  refill(
    panel.querySelector("#crossing-rows"),
    ...rows.map((row) => {
      const line = el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch(`--axis-${row.axis}`), [row.axis, row.level].filter(Boolean).join(", ")),
        number(`${integer(row.groupsAcross)} of ${integer(row.groups)}`),
        ...passed(row.across, row.groupsAcross === 0),
        ...passed(row.inside, row.groupsAcross === row.groups),
      );
      line.dataset.axis = row.axis;
      line.dataset.level = row.level;
      return line;
    }),
  );
}
