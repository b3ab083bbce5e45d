"""Find bottlenecks of the whole run: stragglers, pipeline bubbles, and slow links.

A straggler is a rank that the others wait for in most steps. The mean wait that each rank causes in a traced step comes
from `jobs.runs.diagnosis.collective_timing`. A rank is a straggler if, over the last steps:

1. It causes the longest wait in MIN_STEP_FRACTION of the steps, and more often than chance: if all N ranks were alike,
   each would cause it in 1 of N steps. The probability of this number of steps, times N ranks, is below MAX_CHANCE.
2. The median wait is at least MIN_WAIT_FRACTION of the step, and MIN_WAIT_RATIO the wait for the next rank.
3. Even in the quietest quarter of steps, the wait is MIN_QUIET_RATIO of the median. Contention comes in bursts, but a
   slow rank is slow in every step.
4. This holds for at least MIN_STEPS and MIN_DURATION_S (MIN_SMALL_DURATION_S below SMALL_FRACTION of the step), and in
   most of the last RECENT_STEPS.

A rank that its host recently saw stopped or throttled more than once is a straggler earlier: if the others wait for it
MIN_WAIT_FRACTION of the time over MIN_DURATION_S, and MIN_WAIT_RATIO as long as for the next rank.

The longest such window counts. It begins where steps with half the usual wait start to outnumber the others. Medians
and counts tolerate a few steps that were slow for another reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from statistics import median, quantiles
from typing import NamedTuple

from jobs.core.verdict_schema import MAX_STRAGGLERS, Straggler
from jobs.runs.diagnosis.collective_timing import Charge, TransferRoute, is_between_hosts
from jobs.runs.diagnosis.findings import (
    RunFinding,
    capitalize,
    format_percent,
    format_ranks,
    format_seconds,
    make_evidence,
    truncate,
)
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.rank_reports import DelayCause, ProcessStates
from jobs.runs.diagnosis.step_window import BASELINE_STEPS, WINDOW_STEPS, StepSummary, StepWindow
from jobs.runs.diagnosis.traced_step import OTHER
from planner.cost.timing import Timer
from planner.facts.layout import get_coordinates
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_problems
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.search.layout_search import compute_needed_bytes

MIN_BUBBLE = 0.15  # fraction of the step
MIN_SPEEDUP = 1.05
MAX_FACTOR = 16


class BetterMicroBatches(NamedTuple):
    """Describe a faster number of micro-batches. `bubble` is a fraction of the step, `times` the speedup."""

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

    def make_findings(self, steps: Sequence[StepSummary]) -> Iterator[RunFinding]:
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
        idle_text = format_seconds(median(pipe.bubble_s for pipe, _ in idle_steps))
        facts = (make_evidence(f"each rank idles {idle_text} per step in the {layout.schedule} schedule"),)
        reason = "Stages are idle while the pipeline fills and drains in each step."
        following = "Try another pipeline schedule, or fewer pipeline stages."
        if better := self._better:
            sentence += (
                f" With {_format_micro_batches(better.micro_batches)}, "
                f"the planner predicts a bubble of {format_percent(better.bubble)} "
                f"and steps that are {better.times:.2f} times as fast."
            )
            following = f"Set `train.micro_batches` to {better.micro_batches} in a copy of the job."
        yield RunFinding("notice", share, sentence, reason, following, facts, "copy_job")


def _format_micro_batches(number: int) -> str:
    return format_count(number, "micro-batch", "micro-batches")


def find_better_micro_batches(spec: JobSpec, cluster: Cluster) -> BetterMicroBatches | None:
    """Return the fastest valid number of micro-batches that fits, or None if its speedup is below MIN_SPEEDUP.

    Candidates are 2, 4, .. MAX_FACTOR times the number of micro-batches of the run.
    """
    timer = Timer(cluster)
    current = timer.get_rank_mean(spec)
    candidates = []
    for exponent in range(1, MAX_FACTOR.bit_length()):
        micro_batches = spec.train.micro_batches * 2**exponent
        train = spec.train.model_copy(update={"micro_batches": micro_batches})
        other_spec = spec.model_copy(update={"train": train})
        if find_problems(other_spec) or compute_needed_bytes(other_spec, cluster) > cluster.accelerator.memory_bytes:
            continue
        time = timer.get_rank_mean(other_spec)
        candidates.append(BetterMicroBatches(micro_batches, time.bubble_s / time.step_s, current.step_s / time.step_s))
    best = max(candidates, key=lambda better: better.times, default=None)
    return best if best is not None and best.times >= MIN_SPEEDUP else None


RECENT_LINK_STEPS = 6
MIN_SLOWDOWN = 4.0
MIN_EXTRA_TIME = 0.25  # fraction of the step


def find_slow_links(run: PlannedRun, window: StepWindow) -> Iterator[RunFinding]:
    """Yield a finding if transfers are MIN_SLOWDOWN times as slow as at the start of the run.

    The extra time must be MIN_EXTRA_TIME of the step. Medians over recent steps are compared, without waits for late
    ranks. Transfers inside a host without GPUs are copies by the CPU and are not checked.
    """
    steps = window.steps[-RECENT_LINK_STEPS:]
    if len(steps) < RECENT_LINK_STEPS or window.sampled <= BASELINE_STEPS + RECENT_LINK_STEPS:
        return
    step_s = median(step.step_s for step in steps)
    slow: list[tuple[float, float, TransferRoute]] = []
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
    yield RunFinding(
        "slow",
        share,
        f"Slow link: between {between}. "
        f"The slower {route.op} on {route.group.axis} adds {format_percent(share)} to each step.",
        f"Compared with the start of the run, transfers take {slowdown}, without the wait for late ranks.",
        f"Check the network of {' and '.join(hosts)}." if run.members else "Check the network of the hosts.",
        tuple(facts),
    )


MAX_CHANCE = 1e-3
MIN_STEP_FRACTION = 0.7
MIN_WAIT_FRACTION = 0.1
MIN_WAIT_RATIO = 2.0
MIN_QUIET_RATIO = 1 / 3
MIN_STEPS = 6
MIN_DURATION_S = 8.0
# Another process may take this much for some seconds, and WINDOW_STEPS steps may not last much longer.
SMALL_FRACTION, MIN_SMALL_DURATION_S = 0.15, 14.0
RECENT_STEPS = 4
WINDOW_LENGTHS = (WINDOW_STEPS, 48, 32, 24, 16, 12, 8, MIN_STEPS)
MIN_EXPERT_EXCESS = 1.25  # all-to-all bytes relative to other ranks
COMPUTE_WORK = ("forward", "backward", "weights", "eval", OTHER)
NEXT_STEPS: dict[str, str] = {
    "compute": "Check {host} for other processes, low clock rates, and high temperature.",
    "data": "Check the storage from which {host} reads training data.",
    "checkpoint": "Check the disk on which {host} saves checkpoints.",
    "optimizer": "Check {host} for other processes.",
    "link": "Check the network of {host}.",
    "quota": "Raise the CPU quota of the job's cgroup on {host}, or run fewer ranks on this host.",
    "stopped": "Find the process or user on {host} that stops the rank.",
    "contention": "Run fewer ranks, or fewer other processes, on {host}.",
    "experts": "Raise the weight of the load-balancing loss of the experts, or set a capacity factor.",
    "unknown": "Check {host} for other processes.",
}


class LateRank(NamedTuple):
    """Describe a straggler. `is_held`: the process was stopped or throttled."""

    rank: int
    steps: tuple[StepSummary, ...]
    times: int  # number of steps in which the others waited longest for the rank
    wait_s: float  # median
    share: float  # of the step, or of all the time if `is_held`
    is_held: bool = False


def find_stragglers(run: PlannedRun, steps: Sequence[StepSummary], held_ranks: Iterable[int] = ()) -> list[LateRank]:
    """Return the current stragglers, the worst first. `held_ranks`: those that were stopped or throttled repeatedly."""
    waits = [step.get_wait_by_rank() for step in steps]
    by_rank: dict[int, LateRank] = {}
    for length in WINDOW_LENGTHS:
        for late in _find_in_window(run.world_size, steps[-length:], waits[-length:]):
            by_rank.setdefault(late.rank, late)
    for rank in held_ranks:
        held_late = _check_held_rank(rank, steps, waits)
        if rank not in by_rank and held_late is not None:
            by_rank[rank] = held_late
    return sorted(by_rank.values(), key=lambda late: -late.share)[:MAX_STRAGGLERS]


def _find_in_window(
    world_size: int, steps: Sequence[StepSummary], waits_by_step: Sequence[Mapping[int, float]]
) -> Iterator[LateRank]:
    duration_s = steps[-1].ended - steps[0].ended if steps else 0.0
    if len(steps) < MIN_STEPS or duration_s < MIN_DURATION_S:
        return
    longest_waits = [max(ranks, key=lambda rank: ranks[rank]) if ranks else -1 for ranks in waits_by_step]
    for rank in set(longest_waits) - {-1}:
        num_times = longest_waits.count(rank)
        if num_times < MIN_STEP_FRACTION * len(steps) or longest_waits[-RECENT_STEPS:].count(rank) <= RECENT_STEPS // 2:
            continue
        if world_size * compute_chance(len(steps), num_times, world_size) > MAX_CHANCE:
            continue
        waits = [ranks.get(rank, 0.0) for ranks in waits_by_step]
        others = [max((s for other, s in ranks.items() if other != rank), default=0.0) for ranks in waits_by_step]
        share = median(wait / step.step_s for wait, step in zip(waits, steps, strict=True))
        if share < MIN_WAIT_FRACTION or (share < SMALL_FRACTION and duration_s < MIN_SMALL_DURATION_S):
            continue
        wait_s, quiet_s = median(waits), quantiles(waits, n=4)[0]
        if wait_s >= MIN_WAIT_RATIO * median(others) and quiet_s >= MIN_QUIET_RATIO * wait_s:
            first_index = _find_first_late([wait >= wait_s / 2 for wait in waits])
            yield LateRank(rank, tuple(steps[first_index:]), longest_waits[first_index:].count(rank), wait_s, share)


def _check_held_rank(
    rank: int, steps: Sequence[StepSummary], waits_by_step: Sequence[Mapping[int, float]]
) -> LateRank | None:
    """Check the last MIN_DURATION_S seconds of a rank that was stopped or throttled."""
    lengths = [n for n in reversed(WINDOW_LENGTHS) if n <= len(steps)]
    length = next((n for n in lengths if steps[-1].ended - steps[-n].ended >= MIN_DURATION_S), 0)
    if not length:
        return None
    recent_steps, num_times = steps[-length:], 0
    total: dict[int, float] = {rank: 0.0}
    for ranks in waits_by_step[-length:]:
        num_times += max(ranks, key=lambda other: ranks[other], default=-1) == rank
        for other, wait_s in ranks.items():
            total[other] = total.get(other, 0.0) + wait_s
    own_s = total.pop(rank)
    share = own_s / sum(step.step_s for step in recent_steps)
    if share < MIN_WAIT_FRACTION or own_s < MIN_WAIT_RATIO * max(total.values(), default=0.0):
        return None
    return LateRank(rank, tuple(recent_steps), num_times, own_s / length, share, is_held=True)


def _find_first_late(is_late: Sequence[bool]) -> int:
    """Return the index from which late steps outnumber the others most, at least MIN_STEPS from the end."""
    surplus = list(accumulate(1 if value else -1 for value in reversed(is_late)))
    return len(is_late) - 1 - max(range(MIN_STEPS - 1, len(is_late)), key=lambda index: (surplus[index], -index))


def compute_chance(steps: int, times: int, world: int) -> float:
    """Return the probability that one of `world` equal ranks causes the longest wait in `times` or more steps."""
    p = 1 / max(2, world)
    return sum(math.comb(steps, k) * p**k * (1 - p) ** (steps - k) for k in range(times, steps + 1))


def explain(run: PlannedRun, late: LateRank, processes: ProcessStates, now: float) -> DelayCause:
    """Find what a straggler spends more time on than its peers: the ranks of its stage, or all ranks."""
    peers = _get_peers(run, late.rank)
    hint = processes.explain_slow_compute(late.rank, peers, now)

    def compute_excess(get_seconds: Callable[[StepSummary, int], float]) -> float:
        excesses = []
        for step in late.steps:
            others = [get_seconds(step, other) for other in peers if other in step.own]
            excesses.append(get_seconds(step, late.rank) - median(others) if others else 0.0)
        return median(excesses)

    excess_s = {
        "compute": compute_excess(lambda step, rank: sum(step.own[rank].get(work, 0.0) for work in COMPUTE_WORK)),
        "data": compute_excess(lambda step, rank: step.own[rank].get("data", 0.0)),
        "checkpoint": compute_excess(lambda step, rank: step.own[rank].get("checkpoint", 0.0)),
        "optimizer": compute_excess(lambda step, rank: step.own[rank].get("optimizer", 0.0)),
        "link": compute_excess(lambda step, rank: step.moving[rank]),
    }
    part = max(excess_s, key=lambda part: excess_s[part])
    if excess_s[part] < 0.3 * late.wait_s:
        text = f"The measured step parts of rank {late.rank} do not explain the delay."
        return hint or DelayCause("unknown", text)
    excess_text = f"{format_seconds(excess_s[part])} longer per step than on its peers"
    share = excess_s[part] / median(step.step_s for step in late.steps)
    hint = hint or processes.explain_by_cpu_waits(late.rank, peers, now, share)
    # Without GPUs, ranks of one host communicate by copies of the CPU.
    has_link = is_between_hosts(run, [late.rank, *peers]) or (run.cluster is not None and run.cluster.device == "cuda")
    is_local = part == "link" and not has_link
    local_text = f"Transfers inside the host of rank {late.rank} take {excess_text}"
    if hint is not None and (is_local or part in ("compute", "optimizer")):
        slow_text = local_text if is_local else f"{capitalize(part)} on rank {late.rank} takes {excess_text}"
        return DelayCause(hint.cause, f"{slow_text}. {hint.reason}")
    if part == "compute":
        token_ratio = _compare_expert_bytes(late, peers)
        if token_ratio > MIN_EXPERT_EXCESS:
            tokens = f"The experts on rank {late.rank} get {token_ratio:.1f} times the usual tokens"
            return DelayCause("experts", f"{tokens}, so compute takes {excess_text}.")
        return DelayCause("compute", f"Compute on rank {late.rank} takes {excess_text}.")
    if is_local:
        possible_causes = "perhaps because of other processes, a CPU quota, or repeated stops"
        return DelayCause("unknown", f"{local_text}, {possible_causes}.")
    words = {
        "data": f"The wait for training data on rank {late.rank} takes {excess_text}.",
        "checkpoint": f"Saving checkpoints on rank {late.rank} takes {excess_text}.",
        "optimizer": f"The optimizer on rank {late.rank} takes {excess_text}.",
        "link": f"Communication on rank {late.rank} takes {excess_text}.",
    }
    return DelayCause("compute" if part == "optimizer" else part, words[part])  # type: ignore[arg-type]


def _get_peers(run: PlannedRun, rank: int) -> list[int]:
    ranks = [other for other in range(run.world_size) if other != rank]
    if run.spec is None or run.spec.layout.pp == 1:
        return ranks
    layout = run.spec.layout
    stage = get_coordinates(rank, layout).pp
    return [other for other in ranks if get_coordinates(other, layout).pp == stage] or ranks


def _compare_expert_bytes(late: LateRank, peers: Sequence[int]) -> float:
    """Return the bytes of a rank's all-to-alls relative to its peers. Experts return what they receive."""
    own_bytes = sum(step.experts.get(late.rank, 0) for step in late.steps)
    other_bytes = [sum(step.experts.get(rank, 0) for step in late.steps) for rank in peers]
    usual_bytes = median(other_bytes) if other_bytes else 0
    return own_bytes / usual_bytes if usual_bytes else 1.0


def make_straggler(
    run: PlannedRun, late: LateRank, processes: ProcessStates, now: float
) -> tuple[Straggler, RunFinding]:
    """Return the straggler for the page and its finding."""
    explanation = explain(run, late, processes, now)
    charges: dict[Charge, float] = {}
    for step in late.steps:
        for key, wait_s in step.charges.items():
            if key[1] == late.rank:
                charges[key] = charges.get(key, 0.0) + wait_s
    axis = max(charges, key=lambda key: charges[key])[0]
    calls = sum(step.calls.get((axis, late.rank), 0) for step in late.steps)
    last_in = sum(step.came_last.get((axis, late.rank), 0) for step in late.steps) / calls if calls else 0.0
    first, last = late.steps[0].number, late.steps[-1].number
    rank_text = run.format_rank(late.rank)
    average, per = ("mean", "the time") if late.is_held else ("median", "each step")
    waits = f"Other ranks wait for rank {late.rank} in {format_percent(late.share)} of {per} since step {first}."
    sentence = f"Straggler: {rank_text}. {waits}"
    host = run.get_host(late.rank) or "its host"
    straggler: Straggler = {
        "rank": late.rank,
        "host": run.get_host(late.rank),
        "axis": axis,
        "cause": explanation.cause,
        "since_step": first,
        "seconds": late.wait_s,
        "share": late.share,
        "last_in": last_in,
        "text": truncate(f"{sentence} {explanation.reason}"),
    }
    texts = (
        f"other ranks wait {format_seconds(late.wait_s)} per step for rank {late.rank} ({average})",
        f"other ranks wait longest for rank {late.rank} in {late.times} of {len(late.steps)} steps",
        f"rank {late.rank} arrives last in {format_percent(last_in)} of its {axis} collectives",
        explanation.reason,
    )
    facts = tuple(make_evidence(text, [late.rank], (first, last)) for text in texts)
    following = NEXT_STEPS[explanation.cause].format(host=host)
    return straggler, RunFinding(
        "slow", late.share, sentence, explanation.reason, following, facts, "open_log", late.rank
    )
