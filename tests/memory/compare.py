"""The planner's memory beside what tensors need at once in a dry run, every stage of a layout."""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.memory import find_peak
from planner.facts.spec import JobSpec
from workers.dry_run import run_dry_step


class Found(NamedTuple):
    """One stage of one layout; `off` is predicted over measured, less 1."""

    spec: JobSpec
    stage: int
    measured: int
    predicted: int

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def words(self) -> str:
        model, layout, train = self.spec.model, self.spec.layout, self.spec.train
        axes = " ".join(f"{a}{getattr(layout, a)}" for a in ("dp", "pp", "tp", "cp", "ep") if getattr(layout, a) > 1)
        said = [model.arch, f"{model.num_layers} x {model.hidden_size}", f"{model.vocab_size:,}", axes or "alone"]
        said += [f"zero{layout.zero}"] if layout.zero else []
        said += [layout.schedule] if layout.pp > 1 else []
        said += [name for name in ("sequence_parallel", "regather", "keep_gathered") if getattr(layout, name)]
        said += [f"{model.moe.num_experts} experts"] if model.moe else []
        said += ["tied"] if model.tied_embeddings else []
        said += [train.precision, train.attention, f"recompute {layout.recompute}", f"m {train.micro_batches}"]
        return ", ".join(said)


def found(spec: JobSpec) -> list[Found]:
    """The first rank of each stage, which holds the largest shards."""
    ranks = spec.layout.world_size // spec.layout.pp
    several = []
    for stage in range(spec.layout.pp):
        step = run_dry_step(spec, stage * ranks)
        predicted = sum(find_peak(spec, stage).levels)
        several.append(Found(spec, stage, step.peak_bytes + step.optimizer_bytes, predicted))
    return several
