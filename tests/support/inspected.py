"""Lines as NCCL's Inspector plug-in writes them, formats v4.2 and v4.3 (plugins/profiler/inspector of NCCL's source).

No NCCL runs here: these are made up after that source, figures by hand.
"""

from __future__ import annotations

import json
from typing import Any

BEGAN_US = 1_752_867_229_000_000


def header(rank: int, comm: str = "0xaa", ranks: int = 2, name: str = "unknown") -> dict[str, Any]:
    return {"id": comm, "comm_name": name, "rank": rank, "n_ranks": ranks, "nnodes": 1}


def metadata(rank: int, version: str = "v4.2", at: int = 1_000_000) -> dict[str, Any]:
    base = {"inspector_output_format_version": version, "git_rev": "", "rec_mechanism": "nccl_profiler_interface"}
    return {**base, "dump_timestamp_us": BEGAN_US + at, "hostname": "node-1", "pid": 100 + rank}


def collective(number: int, began: int, took: int, *, op: str = "AllReduce", size: int = 4096) -> dict[str, Any]:
    """`began`: microseconds since BEGAN_US, of the kernels."""
    events = [
        {"channel_id": c, "kernel_start_ts": BEGAN_US + began + c, "kernel_stop_ts": BEGAN_US + began + took - c}
        for c in range(2)
    ]
    times = {"coll_start_ts": BEGAN_US + began - 5, "coll_stop_ts": BEGAN_US + began - 4, "kernel_events": events}
    figures = {"coll_exec_time_us": took, "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.0}
    base = {"coll": op, "coll_sn": number, "coll_msg_size_bytes": size, "coll_busbw_gbs": 1.0}
    return {**base, **figures, "event_trace_ts": times}


def log(rank: int, *told: dict[str, Any]) -> bytes:
    """v4.2: each line stands alone."""
    lines = [{"header": header(rank), "metadata": metadata(rank), "coll_perf": one} for one in told]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def log_of_dumps(rank: int, *told: dict[str, Any]) -> bytes:
    """v4.3: the lines after a dump's own share its header."""
    stats = {"coll_records": len(told), "p2p_records": 0}
    first = {"header": header(rank), "metadata": metadata(rank, "v4.3"), "dump_stats": stats}
    return b"".join(json.dumps(line).encode() + b"\n" for line in [first, *({"coll_perf": one} for one in told)])
