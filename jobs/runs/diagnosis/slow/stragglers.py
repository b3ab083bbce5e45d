"""A rank that the others wait for in step after step.

The rule. Of each step that was told event by event it is known what the others waited for each rank on average
(`jobs.runs.diagnosis.events.charging`). A rank is a straggler when, over the last steps,

1. it is the one waited for most more often than chance would make it: were all N ranks alike, each would be that in one
   step of N, and the chance of so many, times N ranks that could show it, is below CHANCE; and in MOST_STEPS of them;
2. the others wait for it LEAST_SHARE of the step at least (the median over the steps), and LEAST_TIMES as long as for
   whoever they wait for second most;
3. even in the quietest quarter of the steps they wait for it QUIETEST of the median: contention comes in bursts, a slow
   rank is slow in every step;
4. those are FEWEST steps and LEAST_S seconds at least, SMALL_S where it costs less than SMALL of the step, and in most
   of the last RECENT steps it still was.

A rank that its host saw stopped or throttled more than once of late is one already when the others wait for it
LEAST_SHARE of the time and LEAST_TIMES as long as for the next, over LEAST_S seconds: what holds it comes and goes, and
the steps between are as fast as ever.

Of several such runs of last steps the longest counts; it began where those in which it was waited for half as long as
usual begin to outnumber the others. Medians and counts are used, so that a few steps that were slow for another reason
change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median, quantiles
from typing import NamedTuple

from jobs.core.verdict_schema import MOST_STRAGGLERS, Cause, Straggler
from jobs.runs.diagnosis.events.charging import Charge
from jobs.runs.diagnosis.events.links import between_hosts
from jobs.runs.diagnosis.events.step import OTHER
from jobs.runs.diagnosis.events.window import KEPT, Found
from jobs.runs.diagnosis.findings import Finding, capital, cut, evidence, percent, seconds
from jobs.runs.diagnosis.run import Run
from jobs.runs.diagnosis.stuck.processes import Processes
from planner.facts.layout import get_coordinates

CHANCE = 1e-3
MOST_STEPS = 0.7
LEAST_SHARE = 0.1
LEAST_TIMES = 2.0
QUIETEST = 1 / 3
FEWEST = 6
LEAST_S = 8.0
# A neighbour that works for some seconds takes so much; KEPT steps may last not much longer.
SMALL, SMALL_S = 0.15, 14.0
RECENT = 4
LENGTHS = (KEPT, 48, 32, 24, 16, 12, 8, FEWEST)
UNEVEN = 1.25  # times the others' bytes of all-to-alls: the router sends it more tokens
COMPUTE = ("forward", "backward", "weights", "eval", OTHER)
NEXT: dict[str, str] = {
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


class Late(NamedTuple):
    """A straggler, and the steps it is one in. `times`: in how many the others waited most for it. `share`: of every
    step, the median, or of all the time where it is held."""

    rank: int
    steps: tuple[Found, ...]
    times: int
    wait_s: float
    share: float
    held: bool = False


def stragglers(run: Run, steps: Sequence[Found], held: Iterable[int] = ()) -> list[Late]:
    """Those of now, the worst first. `held`: ranks that were seen stopped or throttled again and again."""
    waited = [step.of_rank() for step in steps]
    found: dict[int, Late] = {}
    for length in LENGTHS:
        for late in _over(run.world_size, steps[-length:], waited[-length:]):
            found.setdefault(late.rank, late)
    for rank in held:
        late_at_times = _at_times(rank, steps, waited)
        if rank not in found and late_at_times is not None:
            found[rank] = late_at_times
    return sorted(found.values(), key=lambda late: -late.share)[:MOST_STRAGGLERS]


def _over(world: int, steps: Sequence[Found], waited: Sequence[Mapping[int, float]]) -> Iterator[Late]:
    lasted_s = steps[-1].ended - steps[0].ended if steps else 0.0
    if len(steps) < FEWEST or lasted_s < LEAST_S:
        return
    most = [max(ranks, key=lambda rank: ranks[rank]) if ranks else -1 for ranks in waited]
    for rank in set(most) - {-1}:
        times = most.count(rank)
        if times < MOST_STEPS * len(steps) or most[-RECENT:].count(rank) <= RECENT // 2:
            continue
        if world * chance(len(steps), times, world) > CHANCE:
            continue
        waits = [ranks.get(rank, 0.0) for ranks in waited]
        others = [max((s for other, s in ranks.items() if other != rank), default=0.0) for ranks in waited]
        share = median(wait / step.step_s for wait, step in zip(waits, steps, strict=True))
        if share < LEAST_SHARE or (share < SMALL and lasted_s < SMALL_S):
            continue
        wait_s, quiet_s = median(waits), quantiles(waits, n=4)[0]
        if wait_s >= LEAST_TIMES * median(others) and quiet_s >= QUIETEST * wait_s:
            began = _since([wait >= wait_s / 2 for wait in waits])
            yield Late(rank, tuple(steps[began:]), most[began:].count(rank), wait_s, share)


def _at_times(rank: int, steps: Sequence[Found], waited: Sequence[Mapping[int, float]]) -> Late | None:
    """The last LEAST_S seconds and FEWEST steps of a rank that is held, if the others wait for it as long as counts."""
    length = next((n for n in reversed(LENGTHS) if n <= len(steps) and steps[-1].ended - steps[-n].ended >= LEAST_S), 0)
    if not length:
        return None
    recent, times = steps[-length:], 0
    total: dict[int, float] = {rank: 0.0}
    for ranks in waited[-length:]:
        times += max(ranks, key=lambda one: ranks[one], default=-1) == rank
        for one, seconds_s in ranks.items():
            total[one] = total.get(one, 0.0) + seconds_s
    own = total.pop(rank)
    share = own / sum(step.step_s for step in recent)
    if share < LEAST_SHARE or own < LEAST_TIMES * max(total.values(), default=0.0):
        return None
    return Late(rank, tuple(recent), times, own / length, share, held=True)


def _since(late: Sequence[bool]) -> int:
    """The place from which on steps that are late outnumber the others by most, FEWEST from the end at least: one that
    was late by chance long before the others does not count."""
    ahead = list(accumulate(1 if one else -1 for one in reversed(late)))
    return len(late) - 1 - max(range(FEWEST - 1, len(late)), key=lambda place: (ahead[place], -place))


def chance(steps: int, times: int, world: int) -> float:
    """That one of `world` ranks that are all alike is waited for most in so many steps or more."""
    p = 1 / max(2, world)
    return sum(math.comb(steps, k) * p**k * (1 - p) ** (steps - k) for k in range(times, steps + 1))


class Why(NamedTuple):
    cause: Cause
    reason: str


def why(run: Run, late: Late, processes: Processes, now: float) -> Why:
    """What a straggler spends more than its peers, those of its pipeline stage, or all where it has none there."""
    peers = _peers(run, late.rank)
    hint = processes.hint(late.rank, peers, now)
    over = {
        name: median(_excess(step, late.rank, peers, of) for step in late.steps)
        for name, of in (
            ("compute", lambda step, rank: sum(step.own[rank].get(work, 0.0) for work in COMPUTE)),
            ("data", lambda step, rank: step.own[rank].get("data", 0.0)),
            ("checkpoint", lambda step, rank: step.own[rank].get("checkpoint", 0.0)),
            ("optimizer", lambda step, rank: step.own[rank].get("optimizer", 0.0)),
            ("link", lambda step, rank: step.moving[rank]),
        )
    }
    name = max(over, key=lambda part: over[part])
    if over[name] < 0.3 * late.wait_s:
        text = f"The measured step parts of rank {late.rank} do not explain the delay."
        return Why("unknown" if hint is None else _cause(hint.cause), text if hint is None else hint.text)
    more = f"{seconds(over[name])} longer per step than on its peers"
    share = over[name] / median(step.step_s for step in late.steps)
    hint = hint or processes.crowded(late.rank, peers, now, share)
    inside = name == "link" and not _has_links(run, late.rank, peers)
    if hint is not None and (inside or name in ("compute", "optimizer")):
        slow = f"{capital(name)} on rank {late.rank} takes {more}."
        if inside:
            slow = f"Transfers inside the host of rank {late.rank} take {more}."
        return Why(_cause(hint.cause), f"{slow} {hint.text}")
    if name == "compute":
        tokens = _experts(late, peers)
        if tokens > UNEVEN:
            return Why(
                "experts",
                f"The experts on rank {late.rank} get {tokens:.1f} times the usual tokens, so compute takes {more}.",
            )
        return Why("compute", f"Compute on rank {late.rank} takes {more}.")
    if inside:
        starved = "perhaps because of other processes, a CPU quota, or repeated stops"
        return Why("unknown", f"Transfers inside the host of rank {late.rank} take {more}, {starved}.")
    words = {
        "data": f"The wait for training data on rank {late.rank} takes {more}.",
        "checkpoint": f"Saving checkpoints on rank {late.rank} takes {more}.",
        "optimizer": f"The optimizer on rank {late.rank} takes {more}.",
        "link": f"Communication on rank {late.rank} takes {more}.",
    }
    return Why("compute" if name == "optimizer" else _cause(name), words[name])


def _has_links(run: Run, rank: int, peers: Sequence[int]) -> bool:
    """Whether anything but a host's own processors moves its data."""
    return between_hosts(run, [rank, *peers]) or (run.cluster is not None and run.cluster.device == "cuda")


def _cause(name: str) -> Cause:
    return name  # type: ignore[return-value]  # of NEXT's


def _peers(run: Run, rank: int) -> list[int]:
    ranks = [other for other in range(run.world_size) if other != rank]
    if run.spec is None or run.spec.layout.pp == 1:
        return ranks
    layout = run.spec.layout
    stage = get_coordinates(rank, layout).pp
    return [other for other in ranks if get_coordinates(other, layout).pp == stage] or ranks


def _excess(step: Found, rank: int, peers: Sequence[int], of: Callable[[Found, int], float]) -> float:
    told = [of(step, other) for other in peers if other in step.own]
    return of(step, rank) - median(told) if told else 0.0


def _experts(late: Late, peers: Sequence[int]) -> float:
    """Bytes of its all-to-alls over its peers': what an expert gets it sends back."""
    own = sum(step.experts.get(late.rank, 0) for step in late.steps)
    others = [sum(step.experts.get(rank, 0) for step in late.steps) for rank in peers]
    usual = median(others) if others else 0
    return own / usual if usual else 1.0


def told(run: Run, late: Late, processes: Processes, now: float) -> tuple[Straggler, Finding]:
    """As the page has it, and what the verdict may say of it."""
    found = why(run, late, processes, now)
    charges: dict[Charge, float] = {}
    for step in late.steps:
        for key, waited in step.charges.items():
            if key[1] == late.rank:
                charges[key] = charges.get(key, 0.0) + waited
    axis = max(charges, key=lambda key: charges[key])[0]
    calls = sum(step.calls.get((axis, late.rank), 0) for step in late.steps)
    last_in = sum(step.came_last.get((axis, late.rank), 0) for step in late.steps) / calls if calls else 0.0
    first, last = late.steps[0].number, late.steps[-1].number
    where = run.where(late.rank)
    average, of = ("mean", "the time") if late.held else ("median", "each step")
    waits = f"Other ranks wait for rank {late.rank} in {percent(late.share)} of {of} since step {first}."
    sentence = f"Straggler: {where}. {waits}"
    host = run.host_of(late.rank) or "its host"
    straggler: Straggler = {
        "rank": late.rank,
        "host": run.host_of(late.rank),
        "axis": axis,
        "cause": found.cause,
        "since_step": first,
        "seconds": late.wait_s,
        "share": late.share,
        "last_in": last_in,
        "text": cut(f"{sentence} {found.reason}"),
    }
    facts = (
        evidence(
            f"other ranks wait {seconds(late.wait_s)} per step for rank {late.rank} ({average})",
            [late.rank],
            (first, last),
        ),
        evidence(
            f"other ranks wait longest for rank {late.rank} in {late.times} of {len(late.steps)} steps",
            [late.rank],
            (first, last),
        ),
        evidence(
            f"rank {late.rank} arrives last in {percent(last_in)} of its {axis} collectives", [late.rank], (first, last)
        ),
        evidence(found.reason, [late.rank], (first, last)),
    )
    following = NEXT[found.cause].format(host=host)
    return straggler, Finding("slow", late.share, sentence, found.reason, following, facts, "open_log", late.rank)
