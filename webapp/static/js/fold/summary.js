// Folds the summary of an attempt without stream and history (contracts.control.Summary). Pure.
import { keepStep } from "./steps.js";
import { cellKey, rankState } from "./traffic.js";

export function foldSummary(state, summary) {
  state.fromSummary = true;
  const unknown = { step_s: null, tokens: null, samples: null, grad_norm: null, learning_rate: null };
  for (const { step, loss, time } of summary.losses) keepStep(state, step, { ...unknown, time, loss });
  for (const { step, loss, time } of summary.eval_losses) state.evals.set(step, { time, loss });
  for (const item of summary.dry_runs ?? []) state.dryRuns.set(item.rank, item);
  for (const item of summary.checkpoints ?? []) state.checkpoints.set(item.step, item);
  for (const [name, cells] of Object.entries(summary.cells)) {
    const rank = rankState(state, Number(name));
    for (const cell of cells) rank.cells.set(cellKey(cell), cell);
    rank.exactStep = summary.ran_steps ?? summary.steps;
    rank.exactCells = cells.filter((cell) => cell.phase === "step");
  }
  for (const [name, peak] of Object.entries(summary.peak_bytes ?? {})) state.peaks.set(Number(name), peak);
  for (const [name, parts] of Object.entries(summary.memory ?? {})) state.memory.set(Number(name), parts);
  state.cellsLeftOut = summary.cells_left_out ?? 0;
  state.proof = summary.proof ?? null;
  for (const [name, rows] of Object.entries(summary.verdict)) state.verdicts.set(Number(name), rows);
  if (summary.steps > 0) {
    state.progress = { step: summary.steps, steps: null, step_s: null, tokens: null, rate: summary.tokens_per_s, sample_rate: summary.samples_per_s ?? null };
  }
}

// The stream sends all counters again. Steps stay, because they have keys.
export function forgetCounters(state) {
  state.ranks.clear();
  state.verdicts.clear();
  state.cellsLeftOut = 0;
  state.fromSummary = false;
}
