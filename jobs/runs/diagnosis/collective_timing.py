"""Match collectives across ranks, attribute each wait to the rank that caused it, and measure transfers.

The last rank of a collective may itself have waited for another rank before: a rank that is late in a tensor-parallel
group delays its neighbor in the data-parallel group. So each rank carries its waits of this step with their root
causes. A rank that waits for it is charged to these causes first, as far as it has not waited for them itself, and to
the last rank for the rest. See D. Boehme et al., "Identifying the root causes of wait states in large-scale parallel
applications", ICPP 2010. The speed of a transfer counts from the arrival of the last rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Literal, NamedTuple

from contracts.telemetry.items import Op
from jobs.core.verdict_schema import MAX_GROUPS, MAX_NAMED_RANKS, GroupSpeed
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.traced_step import POINT_TO_POINT, HostClocks, ProcessGroup, TracedCall, TracedStep
from planner.facts.collectives import get_bus_factor


class MatchedCall(NamedTuple):
    """Describe one collective with all ranks of its group, or one message. Times are seconds by rank."""

    group: ProcessGroup
    op: Op
    sequence: int
    sender: int  # of a message, -1 for a collective
    ranks: tuple[int, ...]
    payload_bytes: int
    last: int | None  # the rank that arrived last, None if the clocks cannot tell
    arrived: float  # the last arrival
    arrivals: dict[int, float]
    waits: dict[int, float]  # blocked time before the last arrival
    exposed: dict[int, float]  # blocked time during the transfer
    transfer_s: float  # from the last arrival to the first end


def match_calls(step: TracedStep, clocks: HostClocks) -> list[MatchedCall]:
    """Return the collectives that all ranks reported, in the order of their last arrivals."""
    nodes = {rank: one.node for rank, one in step.ranks.items()}
    matched = [_match(calls, nodes, clocks) for calls in _group_calls(step)]
    return sorted(matched, key=lambda meeting: meeting.arrived)


def _group_calls(step: TracedStep) -> Iterator[list[TracedCall]]:
    by_sequence: dict[tuple[ProcessGroup, int], list[TracedCall]] = {}
    pairs: dict[tuple[ProcessGroup, int, int, int], list[TracedCall]] = {}
    for rank_step in step.ranks.values():
        for call in rank_step.calls:
            if call.op not in POINT_TO_POINT:
                by_sequence.setdefault((call.group, call.sequence), []).append(call)
            elif call.peer >= 0:
                ends = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
                pairs.setdefault((call.group, *ends, call.sequence), []).append(call)
    yield from (calls for (group, _), calls in by_sequence.items() if len(calls) == len(group.ranks) > 1)
    yield from (calls for calls in pairs.values() if len(calls) == 2)


def _match(calls: list[TracedCall], nodes: dict[int, int], clocks: HostClocks) -> MatchedCall:
    last = max(calls, key=lambda call: call.issued)
    others = [call for call in calls if call is not last]
    waits: dict[int, float] = {}
    is_known = True
    for call in others:
        uncertainty_s = clocks.get_uncertainty_s(nodes[call.rank], nodes[last.rank])
        early_s = last.issued - call.issued
        if early_s <= uncertainty_s:  # it may have arrived later
            is_known = is_known and (uncertainty_s == 0.0 and early_s > 0)
            continue
        waited = min(last.issued, call.ended) - max(call.issued, call.ended - call.blocked_s)
        if waited > 0:
            waits[call.rank] = waited
    return MatchedCall(
        group=last.group,
        op="send" if last.op in POINT_TO_POINT else last.op,
        sequence=last.sequence,
        sender=next((call.rank for call in calls if call.op == "send"), -1),
        ranks=tuple(sorted(call.rank for call in calls)),
        payload_bytes=max(call.payload_bytes for call in calls),
        last=last.rank if is_known else None,
        arrived=last.issued,
        arrivals={call.rank: call.issued for call in calls},
        waits=waits if is_known else {},
        exposed={call.rank: max(0.0, call.blocked_s - waits.get(call.rank, 0.0)) for call in calls},
        transfer_s=max(0.0, min(call.ended for call in calls) - last.issued),
    )


Charge = tuple[str, int]  # axis, rank that caused the wait


class WaitCharges(NamedTuple):
    """Hold the waits of one step, and the number of collectives by axis and rank."""

    waits: dict[int, dict[Charge, float]]  # seconds by waiting rank and charge
    came_last: dict[Charge, int]  # in which the rank was last
    calls: dict[Charge, int]  # whose last rank is known

    def mean(self, world_size: int) -> dict[Charge, float]:
        """Return the seconds that the other ranks waited on average."""
        total: dict[Charge, float] = {}
        for charges in self.waits.values():
            for charge, wait_s in charges.items():
                total[charge] = total.get(charge, 0.0) + wait_s
        return {charge: wait_s / max(1, world_size - 1) for charge, wait_s in total.items()}


def charge_waits(matched_calls: Iterable[MatchedCall], messages: PipelineWaits) -> WaitCharges:
    """Charge waits to ranks, except the waits that a pipeline schedule causes."""
    waits: dict[int, dict[Charge, float]] = {}
    came_last: dict[Charge, int] = {}
    calls: dict[Charge, int] = {}
    owed: dict[int, dict[int, float]] = {}  # waits of each rank so far, by the rank that caused them
    for matched in matched_calls:
        last, axis = matched.last, matched.group.axis
        if last is None:
            continue
        if matched.sender < 0:
            came_last[axis, last] = came_last.get((axis, last), 0) + 1
            for rank in matched.ranks:
                calls[axis, rank] = calls.get((axis, rank), 0) + 1
        inherited = dict(owed.get(last, {}))
        for rank, seconds in matched.waits.items():
            wait_s = seconds - messages.get_common_wait(matched, rank)
            if wait_s <= 0:
                continue
            own_waits = owed.setdefault(rank, {})
            for root, due_s in _split_wait(wait_s, inherited, own_waits, last, rank):
                own_waits[root] = own_waits.get(root, 0.0) + due_s
                charges = waits.setdefault(rank, {})
                charges[axis, root] = charges.get((axis, root), 0.0) + due_s
    return WaitCharges(waits, came_last, calls)


def _split_wait(
    waited: float, last_waits: dict[int, float], own: dict[int, float], last: int, rank: int
) -> Iterator[tuple[int, float]]:
    """Yield who caused a wait: ranks for which only the last rank has waited, and then the last rank."""
    inherited = {root: seconds - own.get(root, 0.0) for root, seconds in last_waits.items() if root != rank}
    inherited = {root: seconds for root, seconds in inherited.items() if seconds > 0}
    total = sum(inherited.values())
    share = min(1.0, waited / total) if total else 0.0
    yield from ((root, seconds * share) for root, seconds in inherited.items())
    if waited > total:
        yield last, waited - total


class PipelineWaits:
    """Find pipeline waits that no single rank causes.

    A wait for a message counts as far as all replicas of the stage waited equally. A wait for a rank of another stage
    counts as far as all ranks of that stage were late. `jobs.runs.diagnosis.step_window` splits these waits into the
    schedule's bubble and uneven stages.
    """

    def __init__(self, matched_calls: Iterable[MatchedCall], get_stage: Callable[[int], int]) -> None:
        self._get_stage = get_stage
        self._min_wait_s: dict[tuple[int, int, int, bool], float] = {}
        for matched in matched_calls:
            for rank in matched.ranks if matched.sender >= 0 else ():
                key, waited = self._key(matched, rank), matched.waits.get(rank, 0.0)
                self._min_wait_s[key] = min(waited, self._min_wait_s.get(key, waited))

    def get_common_wait(self, matched: MatchedCall, rank: int) -> float:
        """Return the seconds of a rank's wait that no single rank caused."""
        if matched.sender >= 0:
            return self._min_wait_s[self._key(matched, rank)]
        assert matched.last is not None
        stage = self._get_stage(matched.last)
        if self._get_stage(rank) == stage:
            return 0.0
        first = min(arrival for other, arrival in matched.arrivals.items() if self._get_stage(other) == stage)
        return max(0.0, matched.waits[rank] - (matched.arrived - first))

    def _key(self, matched: MatchedCall, rank: int) -> tuple[int, int, int, bool]:
        other = next(one for one in matched.ranks if one != rank)
        return self._get_stage(rank), self._get_stage(other), matched.sequence, rank == matched.sender


MIN_TIMED_BYTES = 64 * 1024  # latency dominates smaller transfers


class TransferRoute(NamedTuple):
    """Identify the ranks of a transfer: a group, or sender and receiver of a message."""

    group: ProcessGroup
    op: Op
    ranks: tuple[int, ...]


class TransferStats(NamedTuple):
    """Sum the transfers of one step on one route. `transfer_s` starts at the last arrival."""

    calls: int
    payload_bytes: int
    transfer_s: float
    bus_bytes_s: float | None  # median bus bandwidth, None if all transfers were small


def sum_transfers(matched_calls: Iterable[MatchedCall]) -> dict[TransferRoute, TransferStats]:
    """Return the transfers of a step. A collective that overlaps with the one before in its group begins at its end."""
    sums: dict[TransferRoute, tuple[int, int, float, list[float]]] = {}
    ends: dict[tuple[int, ...], float] = {}
    for matched in matched_calls:
        ranks = matched.ranks
        if matched.sender >= 0:
            ranks = (matched.sender, *(rank for rank in ranks if rank != matched.sender))
        route = TransferRoute(matched.group, matched.op, ranks)
        end = matched.arrived + matched.transfer_s
        duration_s = max(0.0, end - max(matched.arrived, ends.get(ranks, 0.0)))
        ends[ranks] = max(end, ends.get(ranks, 0.0))
        calls, num_bytes, seconds, speeds = sums.get(route, (0, 0, 0.0, []))
        if duration_s > 0 and matched.payload_bytes >= MIN_TIMED_BYTES:
            speeds.append(get_bus_factor(matched.op, len(ranks)) * matched.payload_bytes / duration_s)
        sums[route] = calls + 1, num_bytes + matched.payload_bytes, seconds + duration_s, speeds
    return {
        route: TransferStats(calls, num_bytes, duration_s, median(speeds) if speeds else None)
        for route, (calls, num_bytes, duration_s, speeds) in sums.items()
    }


class LinkSpeed(NamedTuple):
    """Hold the bus bandwidth of a link in bytes per second and its source. None and "" if the hardware is unknown."""

    bytes_s: float | None
    basis: Literal["calibrated", "data sheet", "runs", ""]


def get_link_speed(run: PlannedRun, ranks: Iterable[int]) -> LinkSpeed:
    """Return the speed of the slowest link between ranks. Each rank has its own network link."""
    if run.cluster is None:
        return LinkSpeed(None, "")
    hosts: dict[int, int] = {}
    for rank in ranks:
        node = run.get_node(rank) if run.members else rank // run.cluster.per_node
        hosts[node] = hosts.get(node, 0) + 1
    cluster = run.cluster
    basis: Literal["calibrated", "data sheet"] = "calibrated" if cluster.basis == "calibrated" else "data sheet"
    network_bytes_s = min(hosts.values()) * cluster.network.bytes_per_s
    if len(hosts) > 1 and network_bytes_s < cluster.node.bytes_per_s:
        return LinkSpeed(network_bytes_s, basis)
    return LinkSpeed(cluster.node.bytes_per_s, "runs" if cluster.num_rate_runs else basis)


def is_between_hosts(run: PlannedRun, ranks: Iterable[int]) -> bool:
    return len({run.get_node(rank) for rank in ranks}) > 1


def summarize_speeds(run: PlannedRun, steps: list[dict[TransferRoute, TransferStats]]) -> list[GroupSpeed]:
    """Return the mean speeds of groups over steps, the longest transfers first."""
    by_route: dict[TransferRoute, list[TransferStats]] = {}
    for step in steps:
        for route, stats in step.items():
            by_route.setdefault(route, []).append(stats)
    longest = sorted(by_route.items(), key=lambda item: -median(stats.transfer_s for stats in item[1]))[:MAX_GROUPS]
    return [_serialize_speed(run, route, all_stats) for route, all_stats in longest]


def _serialize_speed(run: PlannedRun, route: TransferRoute, all_stats: list[TransferStats]) -> GroupSpeed:
    bus_speeds = [stats.bus_bytes_s for stats in all_stats if stats.bus_bytes_s is not None]
    link = get_link_speed(run, route.ranks)
    calls = sum(stats.calls for stats in all_stats)
    return {
        "axis": route.group.axis,
        "op": route.op,
        "ranks": list(route.ranks[:MAX_NAMED_RANKS]),
        "group_size": len(route.ranks),
        "calls": calls,
        "payload_bytes": sum(stats.payload_bytes for stats in all_stats) / calls,
        "transfer_s": sum(stats.transfer_s for stats in all_stats) / len(all_stats),
        "bus_bytes_s": median(bus_speeds) if bus_speeds else None,
        "link_bytes_s": link.bytes_s,
        "basis": link.basis,
        "between_hosts": is_between_hosts(run, route.ranks),
    }
