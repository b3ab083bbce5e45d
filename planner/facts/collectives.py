"""Bytes of each collective, in the conventions of nccl-tests (doc/PERFORMANCE.md).

`payload_bytes` is the FULL (gathered) buffer for all_gather, reduce_scatter, gather and scatter.
"""

from __future__ import annotations

from contracts.telemetry.words import Op


def bus_factor(op: Op, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth; also ring-optimal bytes sent per rank over payload bytes."""
    if group_size <= 1 or op == "barrier":
        return 0.0
    if op == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (group_size - 1) / group_size
    return 0.0 if op == "recv" else 1.0


def algorithmic_bytes(op: Op, payload_bytes: int, group_size: int) -> int:
    """What a bandwidth-optimal algorithm makes this rank send, rounded to the nearest byte. A recv sends nothing."""
    return round(bus_factor(op, group_size) * payload_bytes)
