"""Findings about the pipeline bubble, with a better number of micro-batches from the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple

from jobs.runs.diagnosis.events.window import Found
from jobs.runs.diagnosis.findings import Finding, evidence, percent, seconds
from jobs.runs.diagnosis.run import Run
from planner.cost.timing import Timer
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_problems
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.search.layout_search import needed_bytes

NOTABLE = 0.15  # of the step, that is idle
LEAST_FASTER = 1.05
MOST_TIMES = 16


class Better(NamedTuple):
    """A number of micro-batches, the share of the step that idles with it, and how many times faster a step is."""

    micro_batches: int
    bubble: float
    times: float


class Idle:
    """Asks the planner once."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def _better(self) -> Better | None:
        spec, cluster = self._run.spec, self._run.cluster
        return fewer_idle(spec, cluster) if spec is not None and cluster is not None else None

    def findings(self, steps: Sequence[Found]) -> Iterator[Finding]:
        """Yield a finding if the schedule leaves ranks idle for at least NOTABLE of the step."""
        told = [(step.pipe, step.step_s) for step in steps if step.pipe is not None]
        if self._run.spec is None or not told:
            return
        share = median(pipe.bubble_s / step_s for pipe, step_s in told)
        if share < NOTABLE:
            return
        layout, m = self._run.spec.layout, self._run.spec.train.micro_batches
        sentence = (
            f"Pipeline bubble: {percent(share)} of each step, with {_micro_batches(m)} on {layout.pp} pipeline stages."
        )
        bubble_s = median(pipe.bubble_s for pipe, _ in told)
        facts = (evidence(f"each rank idles {seconds(bubble_s)} per step in the {layout.schedule} schedule"),)
        reason = "Stages are idle while the pipeline fills and drains in each step."
        better = self._better
        if better is None:
            following = "Try another pipeline schedule, or fewer pipeline stages."
            yield Finding("notice", share, sentence, reason, following, facts, "copy_job")
            return
        sentence += (
            f" With {_micro_batches(better.micro_batches)}, the planner predicts a bubble of {percent(better.bubble)} "
            f"and steps that are {better.times:.2f} times as fast."
        )
        following = f"Set `train.micro_batches` to {better.micro_batches} in a copy of the job."
        yield Finding("notice", share, sentence, reason, following, facts, "copy_job")


def _micro_batches(number: int) -> str:
    return format_count(number, "micro-batch", "micro-batches")


def fewer_idle(spec: JobSpec, cluster: Cluster) -> Better | None:
    """Return the fastest valid number of micro-batches that fits, or None if it is not LEAST_FASTER times as fast.

    Candidates are 2, 4, .. MOST_TIMES times the number of micro-batches of the run.
    """
    timer = Timer(cluster)
    here = timer.over_ranks(spec)
    found = []
    times = 2
    while times <= MOST_TIMES:
        other = _with(spec, spec.train.micro_batches * times)
        times *= 2
        if find_problems(other) or needed_bytes(other, cluster) > cluster.accelerator.memory_bytes:
            continue
        there = timer.over_ranks(other)
        better = Better(other.train.micro_batches, there.bubble_s / there.step_s, here.step_s / there.step_s)
        found.append(better)
    best = max(found, key=lambda better: better.times, default=None)
    return best if best is not None and best.times >= LEAST_FASTER else None


def _with(spec: JobSpec, micro_batches: int) -> JobSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"micro_batches": micro_batches})})
