"""Imports that are small as they are sent and large, or deep, as they are read."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import psutil
import pytest

from jobs.runs.traces.imports import bounds, inspector, reading
from jobs.runs.traces.imports.parts import ImportProblemError
from tests.jobs.traces.test_imports import read_of, written
from tests.support.inspected import collective, header, log, metadata

DEEP = "is nested deeper than 32"
HEAVY: list[tuple[str, bytes, str, str]] = [
    ("a0.json", b"[" * 200_000, "format", "The file format is unknown."),
    ("k0.json", b'{"schemaVersion":' + b"[" * 200_000, "schemaVersion", DEEP),
    ("k0.json", b'{"traceEvents":[{"args":' + b'{"a":' * 200_000, "traceEvents", DEEP),
    ("k0.json", b'{"traceEvents":[' + b"[" * 200_000, "traceEvents", DEEP),
    ("r0.json", b'{"entries":[],"pg_config":' + b"[" * 200_000, "pg_config", DEEP),
    ("k0.json", b'{"deviceProperties":[' + b"{}," * 10**6, "deviceProperties", "more than 100,000 values"),
    (
        "k0.json",
        b'{"traceEvents":[{"args":[' + b"0," * 10**6,
        "traceEvents",
        "The JSON has more than 100,000 values.",
    ),
    ("k0.json", b'{"schemaVersion":' + b"9" * 5000 + b"}", "JSON", "overflow"),
]


@pytest.mark.parametrize(("name", "data", "field", "words"), HEAVY, ids=[f"{n}: {d[:24]!r}" for n, d, _, _ in HEAVY])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_deep_or_heavy_costs_no_memory(
    tmp_path: Path, name: str, data: bytes, field: str, words: str, packed: bool
) -> None:
    """200,000 brackets took 23 GB, and the board with them: paths to each were kept, each longer than the last."""
    path = written(tmp_path, f"{name}.gz" if packed else name, gzip.compress(data, 1) if packed else data)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ImportProblemError) as told:
        read_of(path)
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert told.value.field == field
    assert words in told.value.message


@pytest.mark.parametrize("events", [b'{"entries":[' + b"{}," * 20, b'{"traceEvents":[' + b"0," * 20])
def test_a_list_is_read_no_further_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: bytes
) -> None:
    monkeypatch.setattr(bounds, "MOST_LISTED", 10)
    with pytest.raises(ImportProblemError, match=r"The file has more than 10 events."):
        read_of(written(tmp_path, "r0.json", events))


def test_of_an_inspector_s_lines_no_more_is_kept_than_is_drawn(tmp_path: Path) -> None:
    """9 KB were 189 MiB: what else a line held was there until the last was read."""
    heavy = log(0, *[{**collective(1, 0, 5), "more": [[]] * 250_000}] * 8)
    path = written(tmp_path, "i.log.gz", gzip.compress(heavy))
    tracemalloc.start()
    try:
        assert len(read_of(path).trace.calls) == 8
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_ranks_that_many_of_an_inspector_s_calls_share_are_there_once(tmp_path: Path) -> None:
    lines = [
        {"header": header(rank, ranks=1000), "metadata": metadata(rank), "coll_perf": collective(number, 0, 5)}
        for rank in range(1000)
        for number in range(1, 3)
    ]
    found = read_of(written(tmp_path, "i.log", b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    assert len({id(call.ranks) for call in found.trace.calls}) == 1


def test_an_inspector_s_collectives_are_counted_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "MOST_EVENTS", 3)
    told = [collective(number, 0, 5) for number in (1, 2)]
    paths = [written(tmp_path, f"{rank}.log", log(rank, *told)) for rank in (0, 1)]
    with pytest.raises(ImportProblemError, match=r"1\.log: line 2: The file has more than 3 collectives"):
        read_of(*paths)


def test_ranks_in_groups_of_collectives_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """69 kB of calls in a group of 20,000 ranks were 305 MiB as a table."""
    monkeypatch.setattr(reading, "MOST_NAMED", 7)
    told = [collective(number, 0, 5) for number in (1, 2)]
    paths = [written(tmp_path, f"{rank}.log", log(rank, *told)) for rank in (0, 1)]
    with pytest.raises(ImportProblemError, match=r"The process groups of 4 collectives list 8 ranks\. The maximum is"):
        read_of(*paths)
