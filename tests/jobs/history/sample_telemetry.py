"""Make telemetry of runs with known counters, as supervisors send it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pyarrow.parquet as pq
import redis

from contracts.names import telemetry_stream
from jobs.runs.history.recording.attempt_recorder import AttemptRecorder, RecordedEntry
from jobs.runs.history.store.folder import HistoryFolder

BEGAN = 1_760_000_000.0


def cell(count: int, *, op: str = "all_reduce", axis: str = "dp", phase: str = "step", size: int = 1000) -> Any:
    """Return the counter of `count` calls of `size` bytes each."""
    return {
        "phase": phase,
        "op": op,
        "axis": axis,
        "group_size": 2,
        "count": count,
        "completed": count,
        "payload_bytes": size * count,
        "algorithmic_bytes": size * count,
        "busy_s": 0.001 * count,
    }


def traffic(rank: int, time: float, *cells: Any) -> Any:
    return {"kind": "traffic", "rank": rank, "time": BEGAN + time, "cells": list(cells), "dropped": 0}


def step(rank: int, number: int, time: float, *cells: Any, **changes: Any) -> Any:
    return {
        "kind": "step",
        "rank": rank,
        "time": BEGAN + time,
        "step": number,
        "ran": number,
        "steps": 100,
        "step_s": 0.5,
        "tokens": 4096,
        "loss": 5.0 - number / 100 if rank == 0 else None,
        "grad_norm": 1.0,
        "learning_rate": 0.001,
        "cells": list(cells),
        "parts": {"data": 0.01, "optimizer": 0.02, "exposed": {"dp": 0.1}, "hidden": {"dp": 0.2}},
        **changes,
    }


def batch(time: float, *items: Any, job: str = "job", **changes: Any) -> Any:
    return {"v": 1, "job": job, "attempt": 1, "time": BEGAN + time, "items": list(items), **changes}


def generate_run(ranks: int, steps: int) -> Iterator[Any]:
    """Yield a batch per half second, with a step and the counters of each rank."""
    for number in range(1, steps + 1):
        time = number / 2
        items = [step(rank, number, time, cell(10 * number), cell(number, op="all_gather")) for rank in range(ranks)]
        items += [traffic(rank, time, cell(3, axis="world", phase="setup")) for rank in range(ranks)]
        yield batch(time, *items)


class Sender:
    """Write to the stream of a member."""

    def __init__(self, client: redis.Redis, job: str, node: int = 0, attempt: int = 1) -> None:
        self._client, self.key = client, telemetry_stream(job, attempt, node)
        self._job, self.number = job, 0

    def send(self, batch_data: Any) -> str:
        body = msgpack.packb({**batch_data, "job": self._job})
        entry: Any = self._client.xadd(self.key, {"b": body, "n": self.number})
        self.number += 1
        return str(entry.decode())


def record_batches(root: Path, batches: list[Any], job: str = "job", node: int = 0) -> AttemptRecorder:
    """Record batches without a stream, and commit them."""
    recording = AttemptRecorder(root, job, 1)
    recording.get_positions(node + 1)
    entries = [
        RecordedEntry(f"{number + 1}-0", number, 0, msgpack.packb(batch_data))
        for number, batch_data in enumerate(batches)
    ]
    recording.add_entries(node, entries)
    recording.commit()
    return recording


def rows(root: Path, job: str, table: str, attempt: int = 1) -> list[dict[str, Any]]:
    """Return the stored rows of a table."""
    folder = HistoryFolder(root, job, attempt)
    return [row for path in folder.get_paths(folder.read_manifest(), table) for row in pq.read_table(path).to_pylist()]
