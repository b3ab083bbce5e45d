"""Bound the memory of imports that are small as files and large, or deeply nested, when read."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import psutil
import pytest

from jobs.runs.traces.imports import json_stream, nccl_inspector, reader
from jobs.runs.traces.imports.common import ImportProblemError
from tests.jobs.traces.test_imports import read_files, write_file
from tests.support.traces import build_collective, build_header, build_inspector_log, build_metadata

HEAVY: list[tuple[str, bytes, str, str]] = [
    ("a0.json", b"[" * 200_000, "events", "no events of collectives or compute"),
    ("k0.json", b'{"schemaVersion":' + b"[" * 200_000, "format", "The file format is unknown."),
    ("k0.json", b'{"traceEvents":[{"args":' + b'{"a":' * 200_000, "events", "nested too deeply"),
    ("k0.json", b'{"traceEvents":[' + b"[" * 200_000, "events", "nested too deeply"),
    ("r0.json", b'{"entries":[],"pg_config":' + b"[" * 200_000, "events", "nested too deeply"),
    ("k0.json", b'{"deviceProperties":[' + b"{}," * 10**6, "format", "The file format is unknown."),
    ("k0.json", b'{"traceEvents":[{"args":[' + b"0," * 10**6, "events", "longer than 1,048,576 characters"),
    ("k0.json", b'{"schemaVersion":' + b"9" * 5000 + b"}", "format", "The file format is unknown."),
]


@pytest.mark.parametrize(("name", "data", "field", "words"), HEAVY, ids=[f"{n}: {d[:24]!r}" for n, d, _, _ in HEAVY])
@pytest.mark.parametrize("is_gzip", [False, True])
def test_rejects_deep_or_large_json_without_memory(
    tmp_path: Path, name: str, data: bytes, field: str, words: str, is_gzip: bool
) -> None:
    """200,000 brackets took 23 GB, because the parser stored a path for each."""
    path = write_file(tmp_path, f"{name}.gz" if is_gzip else name, gzip.compress(data, 1) if is_gzip else data)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ImportProblemError) as raised:
        read_files(path)
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert raised.value.field == field
    assert words in raised.value.message


@pytest.mark.parametrize("events", [b'{"entries":[' + b"{}," * 20, b'{"traceEvents":[' + b"0," * 20])
def test_stops_reading_a_list_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: bytes) -> None:
    monkeypatch.setattr(json_stream, "MAX_MEMBERS", 10)
    with pytest.raises(ImportProblemError, match=r"The list has more than 10 members."):
        read_files(write_file(tmp_path, "r0.json", events))


def test_inspector_lines_store_only_needed_fields(tmp_path: Path) -> None:
    """9 KB took 189 MiB, because unused fields of all lines were stored."""
    heavy = build_inspector_log(0, *[{**build_collective(1, 0, 5), "more": [[]] * 250_000}] * 8)
    path = write_file(tmp_path, "i.log.gz", gzip.compress(heavy))
    tracemalloc.start()
    try:
        assert len(read_files(path).trace.calls) == 8
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_inspector_calls_share_rank_tuples(tmp_path: Path) -> None:
    lines = [
        {
            "header": build_header(rank, ranks=1000),
            "metadata": build_metadata(rank),
            "coll_perf": build_collective(number, 0, 5),
        }
        for rank in range(1000)
        for number in range(1, 3)
    ]
    found = read_files(write_file(tmp_path, "i.log", b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    assert len({id(call.ranks) for call in found.trace.calls}) == 1


def test_counts_inspector_collectives_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_inspector, "MAX_EVENTS", 3)
    records = [build_collective(number, 0, 5) for number in (1, 2)]
    paths = [write_file(tmp_path, f"{rank}.log", build_inspector_log(rank, *records)) for rank in (0, 1)]
    with pytest.raises(ImportProblemError, match=r"1\.log: line 2: The file has more than 3 collectives"):
        read_files(*paths)


def test_limits_ranks_of_all_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """69 kB of calls in a group of 20,000 ranks took 305 MiB as a table."""
    monkeypatch.setattr(reader, "MAX_LISTED_RANKS", 7)
    records = [build_collective(number, 0, 5) for number in (1, 2)]
    paths = [write_file(tmp_path, f"{rank}.log", build_inspector_log(rank, *records)) for rank in (0, 1)]
    with pytest.raises(ImportProblemError, match=r"The process groups of 4 collectives list 8 ranks\. The maximum is"):
        read_files(*paths)
