"""How fast groups move data once all their ranks are there, beside their link."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Literal, NamedTuple

from contracts.telemetry.vocabulary import Op
from jobs.core.verdict_schema import MOST_GROUPS, MOST_RANKS, GroupSpeed
from jobs.runs.diagnosis.events.meetings import Meeting
from jobs.runs.diagnosis.events.step import Group
from jobs.runs.diagnosis.run import Run
from planner.facts.collectives import get_bus_factor
from planner.hardware.cluster import Cluster

LEAST_BYTES = 64 * 1024  # of a transfer: a smaller one's time is latency


class Way(NamedTuple):
    """Between whom data moves: a group, or the two of a message, sender first."""

    group: Group
    op: Op
    ranks: tuple[int, ...]


class Moved(NamedTuple):
    """Of one step, on one way: collectives, bytes of payload, seconds after the last arrival, and the median bus
    bandwidth, None where all were small."""

    calls: int
    payload_bytes: int
    transfer_s: float
    bus_bytes_s: float | None


def moved(found: Iterable[Meeting]) -> dict[Way, Moved]:
    """Of a step, from its meetings in the order in which they could begin. One that was issued while another of its
    group was on its way begins as that one ends."""
    sums: dict[Way, tuple[int, int, float, list[float]]] = {}
    ends: dict[tuple[int, ...], float] = {}
    for meeting in found:
        ranks = meeting.ranks
        if meeting.sender >= 0:
            ranks = (meeting.sender, *(rank for rank in ranks if rank != meeting.sender))
        way = Way(meeting.group, meeting.op, ranks)
        end = meeting.arrived + meeting.transfer_s
        took = max(0.0, end - max(meeting.arrived, ends.get(ranks, 0.0)))
        ends[ranks] = max(end, ends.get(ranks, 0.0))
        calls, size, seconds, speeds = sums.get(way, (0, 0, 0.0, []))
        if took > 0 and meeting.payload_bytes >= LEAST_BYTES:
            speeds.append(get_bus_factor(meeting.op, len(ranks)) * meeting.payload_bytes / took)
        sums[way] = calls + 1, size + meeting.payload_bytes, seconds + took, speeds
    return {
        way: Moved(calls, size, took, median(speeds) if speeds else None)
        for way, (calls, size, took, speeds) in sums.items()
    }


class Speed(NamedTuple):
    """Of a link, bytes/s of bus bandwidth, and what told it; None and nothing where no hardware is known."""

    bytes_s: float | None
    basis: Literal["calibrated", "data sheet", "runs", ""]


def link_speed(run: Run, ranks: Iterable[int]) -> Speed:
    """What the slowest link between ranks does: every rank has its own way out of its host."""
    if run.cluster is None:
        return Speed(None, "")
    hosts: dict[int, int] = {}
    for rank in ranks:
        node = run.member_of(rank) if run.members else rank // run.cluster.per_node
        hosts[node] = hosts.get(node, 0) + 1
    return _slowest(run.cluster, hosts)


def _slowest(cluster: Cluster, hosts: dict[int, int]) -> Speed:
    inside = Speed(cluster.node.bytes_per_s, "runs" if cluster.num_rate_runs else cluster.basis)
    out = min(hosts.values()) * cluster.network.bytes_per_s
    return inside if len(hosts) == 1 or cluster.node.bytes_per_s <= out else Speed(out, cluster.basis)


def between_hosts(run: Run, ranks: Iterable[int]) -> bool:
    return len({run.member_of(rank) for rank in ranks}) > 1


def speeds(run: Run, steps: list[dict[Way, Moved]]) -> list[GroupSpeed]:
    """Medians over steps, those that move for longest first."""
    ways: dict[Way, list[Moved]] = {}
    for step in steps:
        for way, one in step.items():
            ways.setdefault(way, []).append(one)
    longest = sorted(ways.items(), key=lambda item: -median(one.transfer_s for one in item[1]))[:MOST_GROUPS]
    return [_told(run, way, all_of) for way, all_of in longest]


def _told(run: Run, way: Way, all_of: list[Moved]) -> GroupSpeed:
    fast = [one.bus_bytes_s for one in all_of if one.bus_bytes_s is not None]
    link = link_speed(run, way.ranks)
    calls = sum(one.calls for one in all_of)
    return {
        "axis": way.group.axis,
        "op": way.op,
        "ranks": list(way.ranks[:MOST_RANKS]),
        "group_size": len(way.ranks),
        "calls": calls,
        "payload_bytes": sum(one.payload_bytes for one in all_of) / calls,
        "transfer_s": sum(one.transfer_s for one in all_of) / len(all_of),
        "bus_bytes_s": median(fast) if fast else None,
        "link_bytes_s": link.bytes_s,
        "basis": link.basis,
        "between_hosts": between_hosts(run, way.ranks),
    }
