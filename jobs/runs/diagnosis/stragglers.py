"""Find stragglers: ranks that the others wait for in most steps.

The mean wait that each rank causes in a traced step comes from `jobs.runs.diagnosis.wait_attribution`. A rank is a
straggler if, over the last steps:

1. It causes the longest wait in MOST_STEPS of the steps, and more often than chance: if all N ranks were alike, each
   would cause it in 1 of N steps. The probability of so many steps, times N ranks, is below CHANCE.
2. The median wait is at least LEAST_SHARE of the step, and LEAST_TIMES the wait for the next rank.
3. Even in the quietest quarter of steps, the wait is QUIETEST of the median. Contention comes in bursts, but a slow
   rank is slow in every step.
4. This holds for at least FEWEST steps and LEAST_S seconds (SMALL_S if it costs less than SMALL of the step), and in
   most of the last RECENT steps.

A rank that its host recently saw stopped or throttled more than once is a straggler earlier: if the others wait for it
LEAST_SHARE of the time over LEAST_S seconds, and LEAST_TIMES as long as for the next rank.

The longest such window counts. It begins where steps with half the usual wait start to outnumber the others. Medians
and counts tolerate a few steps that were slow for another reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median, quantiles
from typing import NamedTuple

from jobs.core.verdict_schema import MAX_STRAGGLERS, Cause, Straggler
from jobs.runs.diagnosis.findings import Finding, capitalize, format_percent, format_seconds, make_evidence, truncate
from jobs.runs.diagnosis.link_speed import is_between_hosts
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.rank_activity import ProcessStates
from jobs.runs.diagnosis.step_window import WINDOW_STEPS, StepSummary
from jobs.runs.diagnosis.traced_step import OTHER
from jobs.runs.diagnosis.wait_attribution import Charge
from planner.facts.layout import get_coordinates

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
    """Describe a straggler.

    Args:
        times: Number of steps in which the others waited longest for the rank.
        share: Median wait as a fraction of the step, or of all the time if `held`.
        held: The process was stopped or throttled.
    """

    rank: int
    steps: tuple[StepSummary, ...]
    times: int
    wait_s: float
    share: float
    held: bool = False


def find_stragglers(run: PlannedRun, steps: Sequence[StepSummary], held: Iterable[int] = ()) -> list[LateRank]:
    """Return the current stragglers, the worst first. `held`: ranks that were stopped or throttled repeatedly."""
    waits = [step.get_wait_by_rank() for step in steps]
    by_rank: dict[int, LateRank] = {}
    for length in WINDOW_LENGTHS:
        for late in _find_in_window(run.world_size, steps[-length:], waits[-length:]):
            by_rank.setdefault(late.rank, late)
    for rank in held:
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
    """Check the last LEAST_S seconds of a rank that was stopped or throttled."""
    length = next(
        (
            n
            for n in reversed(WINDOW_LENGTHS)
            if n <= len(steps) and steps[-1].ended - steps[-n].ended >= MIN_DURATION_S
        ),
        0,
    )
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
    return LateRank(rank, tuple(recent_steps), num_times, own_s / length, share, held=True)


def _find_first_late(is_late: Sequence[bool]) -> int:
    """Return the index from which late steps outnumber the others most, at least FEWEST from the end."""
    surplus = list(accumulate(1 if value else -1 for value in reversed(is_late)))
    return len(is_late) - 1 - max(range(MIN_STEPS - 1, len(is_late)), key=lambda index: (surplus[index], -index))


def compute_chance(steps: int, times: int, world: int) -> float:
    """Return the probability that one of `world` equal ranks causes the longest wait in `times` or more steps."""
    p = 1 / max(2, world)
    return sum(math.comb(steps, k) * p**k * (1 - p) ** (steps - k) for k in range(times, steps + 1))


class Explanation(NamedTuple):
    """Explain why a rank is late."""

    cause: Cause
    reason: str


def explain(run: PlannedRun, late: LateRank, processes: ProcessStates, now: float) -> Explanation:
    """Find what a straggler spends more time on than its peers: the ranks of its stage, or all ranks."""
    peers = _get_peers(run, late.rank)
    hint = processes.explain_slow_compute(late.rank, peers, now)
    excess_s = {
        part: median(_compute_excess(step, late.rank, peers, get_seconds) for step in late.steps)
        for part, get_seconds in (
            ("compute", lambda step, rank: sum(step.own[rank].get(work, 0.0) for work in COMPUTE_WORK)),
            ("data", lambda step, rank: step.own[rank].get("data", 0.0)),
            ("checkpoint", lambda step, rank: step.own[rank].get("checkpoint", 0.0)),
            ("optimizer", lambda step, rank: step.own[rank].get("optimizer", 0.0)),
            ("link", lambda step, rank: step.moving[rank]),
        )
    }
    part = max(excess_s, key=lambda part: excess_s[part])
    if excess_s[part] < 0.3 * late.wait_s:
        text = f"The measured step parts of rank {late.rank} do not explain the delay."
        return Explanation("unknown" if hint is None else _as_cause(hint.cause), text if hint is None else hint.text)
    excess_text = f"{format_seconds(excess_s[part])} longer per step than on its peers"
    share = excess_s[part] / median(step.step_s for step in late.steps)
    hint = hint or processes.explain_by_cpu_waits(late.rank, peers, now, share)
    is_local = part == "link" and not _uses_links(run, late.rank, peers)
    if hint is not None and (is_local or part in ("compute", "optimizer")):
        slow_text = f"{capitalize(part)} on rank {late.rank} takes {excess_text}."
        if is_local:
            slow_text = f"Transfers inside the host of rank {late.rank} take {excess_text}."
        return Explanation(_as_cause(hint.cause), f"{slow_text} {hint.text}")
    if part == "compute":
        token_ratio = _compare_expert_bytes(late, peers)
        if token_ratio > MIN_EXPERT_EXCESS:
            return Explanation(
                "experts",
                f"The experts on rank {late.rank} get {token_ratio:.1f} times the usual tokens, "
                f"so compute takes {excess_text}.",
            )
        return Explanation("compute", f"Compute on rank {late.rank} takes {excess_text}.")
    if is_local:
        possible_causes = "perhaps because of other processes, a CPU quota, or repeated stops"
        return Explanation(
            "unknown", f"Transfers inside the host of rank {late.rank} take {excess_text}, {possible_causes}."
        )
    words = {
        "data": f"The wait for training data on rank {late.rank} takes {excess_text}.",
        "checkpoint": f"Saving checkpoints on rank {late.rank} takes {excess_text}.",
        "optimizer": f"The optimizer on rank {late.rank} takes {excess_text}.",
        "link": f"Communication on rank {late.rank} takes {excess_text}.",
    }
    return Explanation("compute" if part == "optimizer" else _as_cause(part), words[part])


def _uses_links(run: PlannedRun, rank: int, peers: Sequence[int]) -> bool:
    """Return True if ranks communicate over a network or between GPUs."""
    return is_between_hosts(run, [rank, *peers]) or (run.cluster is not None and run.cluster.device == "cuda")


def _as_cause(name: str) -> Cause:
    return name  # type: ignore[return-value]  # a key of NEXT_STEPS


def _get_peers(run: PlannedRun, rank: int) -> list[int]:
    ranks = [other for other in range(run.world_size) if other != rank]
    if run.spec is None or run.spec.layout.pp == 1:
        return ranks
    layout = run.spec.layout
    stage = get_coordinates(rank, layout).pp
    return [other for other in ranks if get_coordinates(other, layout).pp == stage] or ranks


def _compute_excess(
    step: StepSummary, rank: int, peers: Sequence[int], get_seconds: Callable[[StepSummary, int], float]
) -> float:
    others = [get_seconds(step, other) for other in peers if other in step.own]
    return get_seconds(step, rank) - median(others) if others else 0.0


def _compare_expert_bytes(late: LateRank, peers: Sequence[int]) -> float:
    """Return the bytes of a rank's all-to-alls relative to its peers. Experts return what they receive."""
    own_bytes = sum(step.experts.get(late.rank, 0) for step in late.steps)
    other_bytes = [sum(step.experts.get(rank, 0) for step in late.steps) for rank in peers]
    usual_bytes = median(other_bytes) if other_bytes else 0
    return own_bytes / usual_bytes if usual_bytes else 1.0


def make_straggler(run: PlannedRun, late: LateRank, processes: ProcessStates, now: float) -> tuple[Straggler, Finding]:
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
    average, per = ("mean", "the time") if late.held else ("median", "each step")
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
    facts = (
        make_evidence(
            f"other ranks wait {format_seconds(late.wait_s)} per step for rank {late.rank} ({average})",
            [late.rank],
            (first, last),
        ),
        make_evidence(
            f"other ranks wait longest for rank {late.rank} in {late.times} of {len(late.steps)} steps",
            [late.rank],
            (first, last),
        ),
        make_evidence(
            f"rank {late.rank} arrives last in {format_percent(last_in)} of its {axis} collectives",
            [late.rank],
            (first, last),
        ),
        make_evidence(explanation.reason, [late.rank], (first, last)),
    )
    following = NEXT_STEPS[explanation.cause].format(host=host)
    return straggler, Finding("slow", late.share, sentence, explanation.reason, following, facts, "open_log", late.rank)
