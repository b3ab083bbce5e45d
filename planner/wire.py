"""Bytes that gloo really puts on its links, apart from what a collective hands over or would ideally cost.

gloo's own algorithms as of torch 2.13.0: rings, but a reduce-scatter is carried as an all-reduce of the whole input,
whose other parts are thrown away, and a broadcast goes down a binomial tree. Connections also carry a header a message,
some tens of bytes, which is not counted here.
"""

from __future__ import annotations

from contracts.telemetry import Op

_PER_PAYLOAD = {
    "all_reduce": 2.0,  # a ring's reduce-scatter and all-gather
    "reduce_scatter": 2.0,
    "all_gather": 1.0,
    "all_to_all": 1.0,
    "gather": 1.0,
    "scatter": 1.0,
}


def gloo_bytes(op: Op, payload_bytes: int, group_size: int) -> float:
    """Bytes on the wire for one rank's part in a collective; all ranks' parts sum to what the group sends.

    A broadcast's is spread evenly here: each rank but the root is sent the payload by some other. A receive sends
    nothing, a barrier next to nothing. gloo's reduce sends unlike amounts from unlike ranks, its sum is this.

    Raises:
        ValueError: for an operation whose traffic gloo does not document.
    """
    share = (group_size - 1) / group_size
    if op in ("recv", "barrier"):
        return 0.0
    if op == "send":
        return float(payload_bytes)
    if op == "broadcast":
        return payload_bytes * share
    if op not in _PER_PAYLOAD:
        raise ValueError(f"there is no model of what gloo sends for {op}")
    return payload_bytes * _PER_PAYLOAD[op] * share
