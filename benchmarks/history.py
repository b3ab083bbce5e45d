"""Measure recording and queries of a synthetic attempt with 64 ranks and one hour.

Ratios are printed in addition to figures of this machine: seconds of the run recorded per second of work, and stored
bytes over bytes of the stream.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack

LIMIT_S = 1.0  # for the page of such a job to have its history
HOUR_S = 3600.0
BATCH_S = 2.0  # of telemetry in a batch; supervisors send some a second, with less in each
START_TIME = 1_760_000_000.0
REPEATS = 5
OPS = [
    ("all_reduce", "dp"),
    ("all_gather", "tp"),
    ("reduce_scatter", "tp"),
    ("send", "pp"),
    ("recv", "pp"),
    ("all_reduce", "world"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        set_up_django(Path(folder))
        if not report(Path(folder), options.ranks, options.steps):
            sys.exit(1)


def set_up_django(folder: Path) -> None:
    """Set up Django with the settings of the web process."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    os.environ["MESHBOARD_HISTORY_DIR"] = str(folder)
    import django

    django.setup()


def report(folder: Path, ranks: int, steps: int) -> bool:
    """Print the figures, and return True if the page has its history within LIMIT_S."""
    from jobs.runs.history.recording.attempt_recorder import AttemptRecorder, RecordedEntry
    from jobs.runs.history.store.folder import get_num_bytes

    recording = AttemptRecorder(folder, "synthetic", 1)
    recording.get_positions(1)
    sent, work_s = 0, 0.0
    for number, batch in enumerate(generate_batches(ranks, steps)):
        body = msgpack.packb(batch)
        sent += len(body)
        began = time.process_time()
        recording.add_entries(0, [RecordedEntry(f"{number + 1}-0", number, 0, body)])
        recording.commit_if_due()
        work_s += time.process_time() - began
    began = time.process_time()
    recording.finish("succeeded", "", START_TIME + HOUR_S)
    ending_s = time.process_time() - began
    stored = get_num_bytes(recording.manifest)
    rows = {table: parts[0]["rows"] for table, parts in recording.manifest["parts"].items()}
    print(f"synthetic attempt: {ranks} ranks, {HOUR_S / 60:.0f} minutes, {steps:,} steps")
    print(
        f"kept   {HOUR_S / (work_s + ending_s):8.0f} times the run speed ({work_s:.1f} s, {ending_s:.1f} s for the end)"
    )
    print(f"bytes  {stored / sent:8.3f} x the bytes of the stream: {stored / 2**20:.1f} MiB of {sent / 2**20:.0f} MiB")
    print(f"       {stored / ranks / 2**20:8.2f} MiB per rank and hour")
    print("rows   " + ", ".join(f"{count:,} {table}" for table, count in rows.items()))
    slowest = 0.0
    for what, size, took_s, work_s in measure_queries():
        print(f"{what:28} {took_s:7.3f} s, {work_s:7.3f} s processor, {size / 2**10:8.0f} KiB as JSON")
        slowest = max(slowest, took_s)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"slowest {slowest / LIMIT_S:.2f} of the limit of {LIMIT_S:g} s; load {load:.1f} per core")
    return slowest <= LIMIT_S


def generate_batches(ranks: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield batches of all ranks, each with BATCH_S of telemetry."""
    step_s = HOUR_S / steps
    done = 0
    for end_s in range(int(BATCH_S), int(HOUR_S) + 1, int(BATCH_S)):
        items: list[dict[str, Any]] = []
        while (done + 1) * step_s <= end_s:
            done += 1
            items += [build_step(rank, done, steps, step_s) for rank in range(ranks)]
        if end_s % 4 == 0:
            items += [build_gauge(rank, end_s) for rank in range(ranks)]
        yield {"v": 1, "job": "synthetic", "attempt": 1, "time": START_TIME + end_s, "items": items, "host": "nobody"}


def build_step(rank: int, step: int, steps: int, step_s: float) -> dict[str, Any]:
    jitter = 0.02 * math.sin(step * 1.7 + rank)
    return {
        "kind": "step",
        "rank": rank,
        "time": START_TIME + step * step_s + jitter,
        "step": step,
        "ran": step,
        "steps": steps,
        "step_s": step_s * (1 + jitter),
        "tokens": 2**20,
        "loss": 10 / (1 + step / 500) + jitter if rank == 0 else None,
        "grad_norm": 1 + jitter,
        "learning_rate": 3e-4,
        "parts": {
            "data": 0.001 * (1 + jitter),
            "optimizer": 0.01 * (1 + jitter),
            "exposed": {"dp": 0.03 * (1 + jitter), "tp": 0.02, "pp": 0.05},
            "hidden": {"dp": 0.02, "tp": 0.0, "pp": 0.01},
        },
        "cells": [
            {
                "phase": "step",
                "op": op,
                "axis": axis,
                "group_size": 8,
                "count": 12 * step,
                "completed": 12 * step,
                "payload_bytes": 12_000_000 * step,
                "algorithmic_bytes": 21_000_000 * step,
                "busy_s": 0.01 * step + jitter,
            }
            for op, axis in OPS
        ],
    }


def build_gauge(rank: int, at_s: float) -> dict[str, Any]:
    held = 2**34 + (rank * 37 + int(at_s)) % 1000 * 2**20
    return {"kind": "gauge", "rank": rank, "time": START_TIME + at_s, "resident_bytes": held, "allocated_bytes": held}


def measure_queries() -> Iterator[tuple[str, int, float, float]]:
    """Yield name, response bytes, median seconds, and median CPU seconds of each query."""
    from jobs.runs.history.queries.snapshot import get_snapshot
    from jobs.runs.history.queries.tables import list_attempts, parse_table_query, read_rows

    def table(name: str, **told: str) -> Callable[[], Any]:
        return lambda: read_rows(
            "synthetic", 1, name, parse_table_query(name, {key.strip("_"): [value] for key, value in told.items()})
        )

    middle = {"from_": str(START_TIME + 1800), "to": str(START_TIME + 1860)}
    for what, ask in {
        "snapshot": lambda: get_snapshot("synthetic", 1),
        "index": lambda: list_attempts("synthetic"),
        "traffic, 600 bins by axis": table("traffic", bins="600", by="axis"),
        "traffic, 100 bins by rank": table("traffic", bins="100", by="rank"),
        "steps, 600 bins": table("steps", bins="600"),
        "steps of a minute": table("steps", **middle),
        "steps of a minute, a rank": table("steps", ranks="7", **middle),
        "gauges, 300 bins": table("gauges", bins="300"),
        "marks": table("marks"),
    }.items():
        took, work = [], []
        for _ in range(REPEATS):
            gc.collect()
            began, worked = time.perf_counter(), time.process_time()
            size = len(json.dumps(ask()))
            took.append(time.perf_counter() - began)
            work.append(time.process_time() - worked)
        yield what, size, statistics.median(took), statistics.median(work)


if __name__ == "__main__":
    main()
