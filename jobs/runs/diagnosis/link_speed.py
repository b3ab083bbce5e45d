"""Measure how fast groups transfer data after the last rank has arrived, compared with their link."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Literal, NamedTuple

from contracts.telemetry.vocabulary import Op
from jobs.core.verdict_schema import MAX_GROUPS, MAX_NAMED_RANKS, GroupSpeed
from jobs.runs.diagnosis.planned_run import PlannedRun
from jobs.runs.diagnosis.traced_step import ProcessGroup
from jobs.runs.diagnosis.wait_attribution import MatchedCall
from planner.facts.collectives import get_bus_factor
from planner.hardware.cluster import Cluster

MIN_TIMED_BYTES = 64 * 1024  # latency dominates smaller transfers


class Route(NamedTuple):
    """Identify the ranks of a transfer: a group, or sender and receiver of a message."""

    group: ProcessGroup
    op: Op
    ranks: tuple[int, ...]


class TransferStats(NamedTuple):
    """Sum the transfers of one step on one route.

    Args:
        transfer_s: Seconds after the last arrival.
        bus_bytes_s: Median bus bandwidth, None if all transfers were small.
    """

    calls: int
    payload_bytes: int
    transfer_s: float
    bus_bytes_s: float | None


def sum_transfers(matched_calls: Iterable[MatchedCall]) -> dict[Route, TransferStats]:
    """Return the transfers of a step. A collective that overlaps with the one before in its group begins at its end."""
    sums: dict[Route, tuple[int, int, float, list[float]]] = {}
    ends: dict[tuple[int, ...], float] = {}
    for matched in matched_calls:
        ranks = matched.ranks
        if matched.sender >= 0:
            ranks = (matched.sender, *(rank for rank in ranks if rank != matched.sender))
        route = Route(matched.group, matched.op, ranks)
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
    return _get_slowest(run.cluster, hosts)


def _get_slowest(cluster: Cluster, hosts: dict[int, int]) -> LinkSpeed:
    local = LinkSpeed(cluster.node.bytes_per_s, "runs" if cluster.num_rate_runs else cluster.basis)
    network_bytes_s = min(hosts.values()) * cluster.network.bytes_per_s
    return (
        local
        if len(hosts) == 1 or cluster.node.bytes_per_s <= network_bytes_s
        else LinkSpeed(network_bytes_s, cluster.basis)
    )


def is_between_hosts(run: PlannedRun, ranks: Iterable[int]) -> bool:
    return len({run.get_node(rank) for rank in ranks}) > 1


def summarize_speeds(run: PlannedRun, steps: list[dict[Route, TransferStats]]) -> list[GroupSpeed]:
    """Return the mean speeds of groups over steps, the longest transfers first."""
    by_route: dict[Route, list[TransferStats]] = {}
    for step in steps:
        for route, stats in step.items():
            by_route.setdefault(route, []).append(stats)
    longest = sorted(by_route.items(), key=lambda item: -median(stats.transfer_s for stats in item[1]))[:MAX_GROUPS]
    return [_serialize_speed(run, route, all_stats) for route, all_stats in longest]


def _serialize_speed(run: PlannedRun, route: Route, all_stats: list[TransferStats]) -> GroupSpeed:
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
