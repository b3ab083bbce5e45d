// The parts of a step, planned and measured (StepParts in jobs/core/verdict_schema.py). Pure.
import { byAxis } from "../collectives.js";
import { getStepTime } from "./steptime.js";

export const AXES = ["dp", "pp", "cp", "ep", "tp", "world"];
const ORDER = ["compute", "exposed", "waiting", "bubble", "data", "optimizer", "checkpoint", "hidden"];
const PARTS = ["compute", "bubble", "data", "optimizer", "checkpoint"];

const COMPUTE = new Set(["compute", "recompute", "launch"]); // parts of an estimate that a rank does not measure
const LEAST = 1e-3; // share of the step that a line needs

export const getToken = (part) => (PARTS.includes(part.name) ? `--part-${part.name}` : AXES.includes(part.name) ? `--axis-${part.name}` : "--axis-world");

/** "tp" for exposed communication, "tp overlapped", "compute". */
export const formatPartName = (part) => (part.kind === "hidden" ? `${part.name} overlapped` : part.name);

const getPlace = (part) => {
  const place = ORDER.indexOf(ORDER.includes(part.name) ? part.name : part.kind);
  return place < 0 ? ORDER.length : place;
};
const inOrder = (parts) => [...parts].sort((a, b) => getPlace(a) - getPlace(b) || byAxis(a.name, b.name));

/** The parts of an estimate, means over ranks. An estimate has only the exposed communication of an axis. */
export function plannedParts(estimate) {
  if (!estimate?.time) return null; // a script, or a job of an older version
  const { step_s, parts, interval } = estimate.time;
  const others = parts.filter((part) => part.seconds > 0 && !COMPUTE.has(part.name));
  const compute = parts.filter((part) => COMPUTE.has(part.name)).reduce((sum, part) => sum + part.seconds, 0);
  const kind = (name) => (AXES.includes(name) ? "exposed" : PARTS.includes(name) ? name : "compute");
  return {
    step_s,
    sure: interval?.share ?? 0,
    steps: 0,
    parts: [{ name: "compute", seconds: compute }, ...others].map(({ name, seconds }) => ({ name, kind: kind(name), seconds, waiting_s: 0 })),
  };
}

/** The parts of a job. Every page prefers those of the diagnosis. */
export function diagnosedSteps({ diagnosis, estimate }) {
  return { planned: diagnosis?.planned ?? plannedParts(estimate), measured: diagnosis?.measured ?? null };
}

/** {planned, measured}, null if unknown. The measured step is the one step time of the page, split as in the last steps. */
export function getSteps(job, state) {
  const { planned, measured } = diagnosedSteps(job);
  return { planned, measured: scaledTo(getStepTime(job, state), measured ?? measuredParts(state.ranks)) };
}

/** Parts are means over steps. Scaled, their sum is the median step. */
function scaledTo(step, parted) {
  if (step === null) return parted;
  const { step_s, steps } = step;
  if (!parted) return { step_s, sure: 0, steps, parts: [] };
  const scale = step_s / parted.step_s;
  const parts = parted.parts.map((part) => ({ ...part, seconds: part.seconds * scale, waiting_s: part.waiting_s * scale }));
  return { ...parted, step_s, steps, parts };
}

/** Means over ranks and the last steps (fold/steps.js). Null before the first step. */
export function measuredParts(ranks) {
  const lines = [...ranks.values()].flatMap((rank) => rank.parts ?? []);
  if (lines.length === 0) return null;
  const mean = (of) => lines.reduce((sum, line) => sum + (of(line) ?? 0), 0) / lines.length; // an unknown part is in compute
  const byName = (kind) => {
    const names = [...new Set(lines.flatMap((line) => Object.keys(line[kind])))];
    return Object.fromEntries(names.map((name) => [name, mean((line) => line[kind][name])]));
  };
  const [step_s, data_s, optimizer_s] = [(line) => line.step_s, (line) => line.data, (line) => line.optimizer].map(mean);
  const most = Math.max(...[...ranks.values()].map((rank) => rank.parts?.length ?? 0));
  const steps = most > 1 ? most : 0; // a history has one line, the mean of several steps
  return makeParts({ step_s, data_s, optimizer_s, exposed: byName("exposed"), hidden: byName("hidden") }, steps);
}

/** The parts of mean seconds per step. Compute is the remainder. */
export function makeParts({ step_s, data_s, optimizer_s, exposed, hidden }, steps = 0) {
  const axes = (kind, means) => Object.entries(means).map(([name, seconds]) => ({ name, kind, seconds }));
  const works = Object.entries({ data: data_s ?? 0, optimizer: optimizer_s ?? 0 }).map(([name, seconds]) => ({ name, kind: name, seconds }));
  const parts = [...works, ...axes("exposed", exposed)];
  const compute = Math.max(0, step_s - parts.reduce((sum, part) => sum + part.seconds, 0));
  parts.push({ name: "compute", kind: "compute", seconds: compute }, ...axes("hidden", hidden));
  return { step_s, sure: 0, steps, parts: parts.map((part) => ({ waiting_s: 0, ...part })) };
}

/** Two bars on one scale. Shares are percent of the longer step. */
export function bars(planned, measured) {
  const longest = Math.max(planned?.step_s ?? 0, measured?.step_s ?? 0);
  return [planned, measured].map((side) => {
    if (!side) return null;
    const share = (seconds) => (100 * seconds) / longest;
    const parts = inOrder(side.parts.filter((part) => part.seconds > 0)).map((part) => ({
      ...part,
      share: share(part.seconds),
      waiting: share(Math.min(part.waiting_s, part.seconds)),
    }));
    const shown = parts.filter((part) => part.kind !== "hidden");
    const rest = side.step_s - shown.reduce((sum, part) => sum + part.seconds, 0);
    return { ...side, shown, hidden: parts.filter((part) => part.kind === "hidden"), rest: rest > 1e-3 * side.step_s ? share(rest) : 0 };
  });
}

/** Every part that is large enough for a line: [{part, planned, measured}], null if a side has no value. */
export function partRows(planned, measured) {
  const rows = new Map();
  for (const [side, step] of Object.entries({ planned, measured })) {
    for (const part of step?.parts ?? []) {
      const key = `${part.kind} ${part.name}`;
      const row = rows.get(key) ?? { ...part, planned: null, measured: null, worth: false };
      if (part.seconds > 0) row[side] = part.seconds;
      row.worth ||= part.seconds > LEAST * step.step_s;
      rows.set(key, row);
    }
  }
  return inOrder([...rows.values()].filter((row) => row.worth));
}
