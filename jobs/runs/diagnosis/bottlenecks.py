"""Find bottlenecks of the whole run: pipeline bubbles and slow links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple

from jobs.runs.diagnosis.findings import Finding, format_percent, format_ranks, format_seconds, make_evidence
from jobs.runs.diagnosis.link_speed import Route, is_between_hosts
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.step_window import BASELINE_STEPS, StepSummary, StepWindow
from planner.cost.timing import Timer
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_problems
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.search.layout_search import needed_bytes

MIN_BUBBLE = 0.15  # fraction of the step
MIN_SPEEDUP = 1.05
MAX_FACTOR = 16


class BetterMicroBatches(NamedTuple):
    """Describe a faster number of micro-batches.

    Args:
        bubble: Idle fraction of the step.
        times: Speedup of the step.
    """

    micro_batches: int
    bubble: float
    times: float


class BubbleFinder:
    """Find pipeline bubbles. The planner is called once."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run

    @cached_property
    def _better(self) -> BetterMicroBatches | None:
        spec, cluster = self._run.spec, self._run.cluster
        return find_better_micro_batches(spec, cluster) if spec is not None and cluster is not None else None

    def make_findings(self, steps: Sequence[StepSummary]) -> Iterator[Finding]:
        """Yield a finding if the schedule idles ranks for at least MIN_BUBBLE of the step."""
        idle_steps = [(step.pipeline_idle, step.step_s) for step in steps if step.pipeline_idle is not None]
        if self._run.spec is None or not idle_steps:
            return
        share = median(pipe.bubble_s / step_s for pipe, step_s in idle_steps)
        if share < MIN_BUBBLE:
            return
        layout, m = self._run.spec.layout, self._run.spec.train.micro_batches
        sentence = (
            f"Pipeline bubble: {format_percent(share)} of each step, "
            f"with {_format_micro_batches(m)} on {layout.pp} pipeline stages."
        )
        bubble_s = median(pipe.bubble_s for pipe, _ in idle_steps)
        facts = (
            make_evidence(f"each rank idles {format_seconds(bubble_s)} per step in the {layout.schedule} schedule"),
        )
        reason = "Stages are idle while the pipeline fills and drains in each step."
        better = self._better
        if better is None:
            following = "Try another pipeline schedule, or fewer pipeline stages."
            yield Finding("notice", share, sentence, reason, following, facts, "copy_job")
            return
        sentence += (
            f" With {_format_micro_batches(better.micro_batches)}, "
            f"the planner predicts a bubble of {format_percent(better.bubble)} "
            f"and steps that are {better.times:.2f} times as fast."
        )
        following = f"Set `train.micro_batches` to {better.micro_batches} in a copy of the job."
        yield Finding("notice", share, sentence, reason, following, facts, "copy_job")


def _format_micro_batches(number: int) -> str:
    return format_count(number, "micro-batch", "micro-batches")


def find_better_micro_batches(spec: JobSpec, cluster: Cluster) -> BetterMicroBatches | None:
    """Return the fastest valid number of micro-batches that fits, or None if its speedup is below MIN_SPEEDUP.

    Candidates are 2, 4, .. MAX_FACTOR times the number of micro-batches of the run.
    """
    timer = Timer(cluster)
    current = timer.over_ranks(spec)
    candidates = []
    factor = 2
    while factor <= MAX_FACTOR:
        other_spec = _set_micro_batches(spec, spec.train.micro_batches * factor)
        factor *= 2
        if find_problems(other_spec) or needed_bytes(other_spec, cluster) > cluster.accelerator.memory_bytes:
            continue
        other_time = timer.over_ranks(other_spec)
        better = BetterMicroBatches(
            other_spec.train.micro_batches, other_time.bubble_s / other_time.step_s, current.step_s / other_time.step_s
        )
        candidates.append(better)
    best = max(candidates, key=lambda better: better.times, default=None)
    return best if best is not None and best.times >= MIN_SPEEDUP else None


def _set_micro_batches(spec: JobSpec, micro_batches: int) -> JobSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"micro_batches": micro_batches})})


RECENT_LINK_STEPS = 6
MIN_SLOWDOWN = 4.0
MIN_EXTRA_TIME = 0.25  # fraction of the step


def find_slow_links(run: PlannedRun, window: StepWindow) -> Iterator[Finding]:
    """Yield a finding if transfers are MIN_SLOWDOWN times as slow as at the start of the run.

    The extra time must be MIN_EXTRA_TIME of the step. Medians over recent steps are compared, without waits for late
    ranks. Transfers inside a host without GPUs are copies by the CPU and are not checked.
    """
    steps = window.steps[-RECENT_LINK_STEPS:]
    if len(steps) < RECENT_LINK_STEPS or window.sampled <= BASELINE_STEPS + RECENT_LINK_STEPS:
        return
    step_s = median(step.step_s for step in steps)
    slow: list[tuple[float, float, Route]] = []
    on_gpus = run.cluster is not None and run.cluster.device == "cuda"
    for route, before in window.usual.items():
        if not (on_gpus or is_between_hosts(run, route.ranks)):
            continue
        recent = [step.transfers[route] for step in steps if route in step.transfers]
        if len(recent) < RECENT_LINK_STEPS:
            continue
        usual_s, now_s = median(before), median(stats.transfer_s / stats.calls for stats in recent)
        extra_s = (now_s - usual_s) * median(stats.calls for stats in recent)
        if now_s >= MIN_SLOWDOWN * usual_s and extra_s >= MIN_EXTRA_TIME * step_s:
            slow.append((extra_s / step_s, now_s / usual_s if usual_s else math.inf, route))
    if not slow:
        return
    share, times, route = max(slow)
    hosts = dict.fromkeys(run.get_host(rank) for rank in route.ranks)
    between = " and ".join(hosts) if len(hosts) > 1 else format_ranks(route.ranks)
    slowdown = f"{times:.0f} times as long" if times < 1000 else "far longer"
    facts = [
        make_evidence(
            f"{other.op} on {other.group.axis} takes an extra {format_percent(cost)} of the step", other.ranks
        )
        for cost, _, other in sorted(slow, reverse=True)
    ]
    yield Finding(
        "slow",
        share,
        f"Slow link: between {between}. "
        f"The slower {route.op} on {route.group.axis} adds {format_percent(share)} to each step.",
        f"Compared with the start of the run, transfers take {slowdown}, without the wait for late ranks.",
        f"Check the network of {' and '.join(hosts)}." if run.members else "Check the network of the hosts.",
        tuple(facts),
    )
