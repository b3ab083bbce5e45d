// A step's time told apart, planned and measured: StepParts as jobs/diagnosis/shapes.py has them. Pure.
import { byAxis } from "../collectives.js";

export const AXES = ["dp", "pp", "cp", "ep", "tp", "world"];
const ORDER = ["compute", "exposed", "waiting", "bubble", "data", "optimizer", "checkpoint", "hidden"];
const PARTS = ["compute", "bubble", "data", "optimizer", "checkpoint"];

const COMPUTE = new Set(["compute", "recompute", "launch"]); // of an estimate: what a rank cannot tell apart
const LEAST = 1e-3; // of the step: less is no line of its own

export const tokenOf = (part) => (PARTS.includes(part.name) ? `--part-${part.name}` : AXES.includes(part.name) ? `--axis-${part.name}` : "--axis-world");

/** What a part is called: "tp" for what stands still for it, "tp hidden", "compute". */
export const nameOf = (part) => (part.kind === "hidden" ? `${part.name} hidden` : part.name);

const placeOf = (part) => {
  const place = ORDER.indexOf(ORDER.includes(part.name) ? part.name : part.kind);
  return place < 0 ? ORDER.length : place;
};
const inOrder = (parts) => [...parts].sort((a, b) => placeOf(a) - placeOf(b) || byAxis(a.name, b.name));

/** The planner's, means of all ranks as the measured ones are; it tells of each axis only what nothing hides. */
export function plannedParts(estimate) {
  if (!estimate?.time) return null; // a script, or a job planned before there was a time
  const { step_s, parts, interval } = estimate.time;
  const told = parts.filter((part) => part.seconds > 0 && !COMPUTE.has(part.name));
  const compute = parts.filter((part) => COMPUTE.has(part.name)).reduce((sum, part) => sum + part.seconds, 0);
  const kind = (name) => (AXES.includes(name) ? "exposed" : PARTS.includes(name) ? name : "compute");
  return {
    step_s,
    sure: interval?.share ?? 0,
    steps: 0,
    parts: [{ name: "compute", seconds: compute }, ...told].map(({ name, seconds }) => ({ name, kind: kind(name), seconds, waiting_s: 0 })),
  };
}

/** The same of a job by itself: what its diagnosis says wins, on every page. */
export function diagnosedSteps({ diagnosis, estimate }) {
  return { planned: diagnosis?.planned ?? plannedParts(estimate), measured: diagnosis?.measured ?? null };
}

/** A job's step, {planned, measured}, each null where it is not known: as diagnosed, or else as the page can tell itself. */
export function stepsOf(job, state) {
  const { planned, measured } = diagnosedSteps(job);
  return { planned, measured: measured ?? measuredParts(state.ranks) ?? wholeStep(job, state) };
}

/** Of runs that do not tell their steps apart, the length of one. */
function wholeStep(job, state) {
  const told = job.exit?.summary?.measured;
  const step_s = told?.step_s ?? mean(state.stepTimes);
  return step_s > 0 ? { step_s, sure: 0, steps: told?.steps ?? state.stepTimes.length, parts: [] } : null;
}

const mean = (values) => (values.length > 0 ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** Means over ranks and the steps that are a measure (fold/steps.js). Null before the first. */
export function measuredParts(ranks) {
  const lines = [...ranks.values()].flatMap((rank) => rank.parts ?? []);
  if (lines.length === 0) return null;
  const mean = (of) => lines.reduce((sum, line) => sum + (of(line) ?? 0), 0) / lines.length;
  const byName = (kind) => {
    const names = [...new Set(lines.flatMap((line) => Object.keys(line[kind])))];
    return Object.fromEntries(names.map((name) => [name, mean((line) => line[kind][name])]));
  };
  const [step_s, data_s, optimizer_s] = [(line) => line.step_s, (line) => line.data, (line) => line.optimizer].map(mean);
  const most = Math.max(...[...ranks.values()].map((rank) => rank.parts?.length ?? 0));
  const steps = most > 1 ? most : 0; // of a history there is one line, itself a mean of several steps
  return partsOf({ step_s, data_s, optimizer_s, exposed: byName("exposed"), hidden: byName("hidden") }, steps);
}

/** Of means, seconds a step: what is neither data, waiting nor the optimiser is compute. */
export function partsOf({ step_s, data_s, optimizer_s, exposed, hidden }, steps = 0) {
  const axes = (kind, means) => Object.entries(means).map(([name, seconds]) => ({ name, kind, seconds }));
  const parts = [{ name: "data", kind: "data", seconds: data_s }, { name: "optimizer", kind: "optimizer", seconds: optimizer_s }, ...axes("exposed", exposed)];
  const compute = Math.max(0, step_s - parts.reduce((sum, part) => sum + part.seconds, 0));
  parts.push({ name: "compute", kind: "compute", seconds: compute }, ...axes("hidden", hidden));
  return { step_s, sure: 0, steps, parts: parts.map((part) => ({ waiting_s: 0, ...part })) };
}

/** Bars as the page draws them, on one scale: shares in percent of the longer step. */
export function bars(planned, measured) {
  const longest = Math.max(planned?.step_s ?? 0, measured?.step_s ?? 0);
  return [planned, measured].map((told) => {
    if (!told) return null;
    const share = (seconds) => (100 * seconds) / longest;
    const parts = inOrder(told.parts.filter((part) => part.seconds > 0)).map((part) => ({
      ...part,
      share: share(part.seconds),
      waiting: share(Math.min(part.waiting_s, part.seconds)),
    }));
    const shown = parts.filter((part) => part.kind !== "hidden");
    const rest = told.step_s - shown.reduce((sum, part) => sum + part.seconds, 0);
    return { ...told, shown, hidden: parts.filter((part) => part.kind === "hidden"), rest: rest > 1e-3 * told.step_s ? share(rest) : 0 };
  });
}

/** Every part worth a line on either side, with both figures: [{part, planned, measured}], null where one does not tell it. */
export function partRows(planned, measured) {
  const rows = new Map();
  for (const [side, told] of Object.entries({ planned, measured })) {
    for (const part of told?.parts ?? []) {
      const key = `${part.kind} ${part.name}`;
      const row = rows.get(key) ?? { ...part, planned: null, measured: null, worth: false };
      if (part.seconds > 0) row[side] = part.seconds;
      row.worth ||= part.seconds > LEAST * told.step_s;
      rows.set(key, row);
    }
  }
  return inOrder([...rows.values()].filter((row) => row.worth));
}
