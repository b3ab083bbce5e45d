"""Files that other tools record: NCCL Inspector lines, and a real run of two ranks with torch's own tools.

The Inspector lines are synthetic. They follow formats v4.2 and v4.3 of plugins/profiler/inspector in NCCL's source.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, base_environment, scale_timeout
from webapp.runner import find_free_port

BEGAN_US = 1_752_867_229_000_000


@pytest.fixture(scope="session")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with flight recorder dumps and profiler traces of a real run with two ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    environment = {**base_environment(), "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    command = [sys.executable, "-m", "tests.jobs.traces.recorded_ranks", str(folder)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=ROOT, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=scale_timeout(240))
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
    return folder


def build_header(rank: int, comm: str = "0xaa", ranks: int = 2, name: str = "unknown") -> dict[str, Any]:
    return {"id": comm, "comm_name": name, "rank": rank, "n_ranks": ranks, "nnodes": 1}


def build_metadata(rank: int, version: str = "v4.2", at: int = 1_000_000) -> dict[str, Any]:
    base = {"inspector_output_format_version": version, "git_rev": "", "rec_mechanism": "nccl_profiler_interface"}
    return {**base, "dump_timestamp_us": BEGAN_US + at, "hostname": "node-1", "pid": 100 + rank}


def build_collective(
    number: int, began_us: int, duration_us: int, *, op: str = "AllReduce", size: int = 4096
) -> dict[str, Any]:
    """Build a collective whose kernels start `began_us` after BEGAN_US."""
    start, stop = BEGAN_US + began_us, BEGAN_US + began_us + duration_us
    events = [{"channel_id": c, "kernel_start_ts": start + c, "kernel_stop_ts": stop - c} for c in range(2)]
    times = {"coll_start_ts": start - 5, "coll_stop_ts": start - 4, "kernel_events": events}
    figures = {"coll_exec_time_us": duration_us, "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.0}
    base = {"coll": op, "coll_sn": number, "coll_msg_size_bytes": size, "coll_busbw_gbs": 1.0}
    return {**base, **figures, "event_trace_ts": times}


def build_inspector_log(rank: int, *collectives: dict[str, Any]) -> bytes:
    """Build a log in format v4.2, in which each line has a header."""
    header = {"header": build_header(rank), "metadata": build_metadata(rank)}
    return b"".join(json.dumps({**header, "coll_perf": one}).encode() + b"\n" for one in collectives)


def build_inspector_dump(rank: int, *collectives: dict[str, Any]) -> bytes:
    """Build a log in format v4.3, in which a dump has one header for all its lines."""
    stats = {"coll_records": len(collectives), "p2p_records": 0}
    header = {"header": build_header(rank), "metadata": build_metadata(rank, "v4.3"), "dump_stats": stats}
    return b"".join(
        json.dumps(line).encode() + b"\n" for line in [header, *({"coll_perf": one} for one in collectives)]
    )
