"""Compare the import of Kineto traces in a folder with a separate count of the raw events.

Run `make traces TRACES=FOLDER`. The count reads the whole file at once, and shares no code with the import.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs.runs.traces.imports.common import ImportProblemError
from tests.jobs.traces.kineto_builder import NCCL, build_event, collective_args, read_files, write_trace

MAX_ERROR = 0.01
FOLDER = os.environ.get("TRACES", "")


class Count(NamedTuple):
    """Hold the number of communication kernels and their total time in microseconds."""

    number: int
    total_us: float


def load_events(path: Path) -> list[Any] | None:
    """Return the events of a trace, or None for a file that is not a trace."""
    data = path.read_bytes()
    try:
        value = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError):
        return None
    events = value.get("traceEvents") if isinstance(value, dict) else value
    is_trace = isinstance(events, list) and any(isinstance(event, dict) and event.get("ph") == "X" for event in events)
    return events if is_trace else None


def count_by_hand(events: list[Any]) -> Count:
    """Count kernels whose name contains the name of a library. gloo has no kernels, but annotations with a duration."""
    number, total = 0, 0.0
    for event in events:
        category, name = str(event.get("cat")).lower(), str(event.get("name"))
        is_kernel = category == "kernel" and any(library in name.lower() for library in ("nccl", "rccl"))
        is_gloo = category == "user_annotation" and name.startswith("gloo:")
        if event.get("ph") == "X" and (is_kernel or is_gloo):
            number += 1
            total += event["dur"]
    return Count(number, total)


def count_imported(path: Path) -> Count:
    """Count the imported collectives with a duration."""
    ended = [call for call in read_files(path).trace.calls if call.ended is not None]
    return Count(len(ended), sum((call.ended or 0) - call.issued for call in ended) * 1e6)


def find_difference(by_hand: Count, imported: Count) -> str:
    """Return the difference in words, "" if both counts match."""
    if by_hand.number != imported.number:
        return f"{imported.number} instead of {by_hand.number} collectives"
    error = abs(imported.total_us - by_hand.total_us)
    return f"{error:.1f} microseconds of difference" if error > MAX_ERROR * by_hand.total_us else ""


@pytest.mark.skipif(not FOLDER, reason="TRACES names no folder with traces")
def test_imports_of_a_folder_match_the_raw_events() -> None:
    root = Path(FOLDER)
    rows: list[str] = []
    problems: list[str] = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        events = load_events(path)
        if events is None:
            continue
        by_hand = count_by_hand(events)
        try:
            imported = count_imported(path)
        except ImportProblemError as error:
            problems.append(f"{path.name}: {error}")
            continue
        difference = find_difference(by_hand, imported)
        problems += [f"{path.name}: {difference}"] if difference else []
        counts = f"{by_hand.number:>7} {imported.number:>9} {by_hand.total_us:>13.1f} {imported.total_us:>13.1f}"
        rows.append(f"{path.relative_to(root).as_posix()[-70:]:<70} {counts}  {difference or 'ok'}")
    print(f"\n{'trace':<70} {'by hand':>7} {'imported':>9} {'by hand (us)':>13} {'imported (us)':>13}")
    print("\n".join(rows))
    assert rows, "the folder has no Kineto traces"
    assert not problems, "\n".join(problems)


def test_count_finds_a_difference(tmp_path: Path) -> None:
    events = [build_event("kernel", NCCL, 100 * i, 10, **collective_args()) for i in range(5)]
    path = write_trace(tmp_path, 0, events)
    by_hand, imported = count_by_hand(events), count_imported(path)
    assert by_hand.number == 5
    assert find_difference(by_hand, imported) == ""
    assert find_difference(by_hand._replace(total_us=51), imported)
    assert find_difference(by_hand, count_imported(write_trace(tmp_path, 0, events[1:])))
