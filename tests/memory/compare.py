"""Compare the planner's memory with live tensors of a dry run, for each stage of a layout."""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.memory import find_peak
from planner.facts.spec import JobSpec
from workers.dry_run import run_dry_step


class StageComparison(NamedTuple):
    """One stage of a layout. `error` is predicted over measured, minus 1."""

    spec: JobSpec
    stage: int
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def describe(self) -> str:
        model, layout, train = self.spec.model, self.spec.layout, self.spec.train
        axes = " ".join(f"{a}{getattr(layout, a)}" for a in ("dp", "pp", "tp", "cp", "ep") if getattr(layout, a) > 1)
        output = [model.arch, f"{model.num_layers} x {model.hidden_size}", f"{model.vocab_size:,}", axes or "alone"]
        output += [f"zero{layout.zero}"] if layout.zero else []
        output += [layout.schedule] if layout.pp > 1 else []
        output += [name for name in ("sequence_parallel", "regather", "keep_gathered") if getattr(layout, name)]
        output += [f"{model.moe.num_experts} experts"] if model.moe else []
        output += ["tied"] if model.tied_embeddings else []
        output += [train.precision, train.attention, f"recompute {layout.recompute}", f"m {train.micro_batches}"]
        return ", ".join(output)


def compare_stages(spec: JobSpec) -> list[StageComparison]:
    """Compare the first rank of each stage, which has the largest shards."""
    ranks = spec.layout.world_size // spec.layout.pp
    several = []
    for stage in range(spec.layout.pp):
        step = run_dry_step(spec, stage * ranks)
        predicted = sum(find_peak(spec, stage).levels)
        several.append(StageComparison(spec, stage, step.peak_bytes + step.optimizer_bytes, predicted))
    return several
