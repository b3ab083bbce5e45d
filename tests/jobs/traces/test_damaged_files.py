"""Import damaged trace files: one bad event, a cut line, or a cut gzip file costs that event, with a note."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.runs.traces.imports import json_stream
from tests.jobs.traces.kineto_builder import NCCL, build_event, collective_args, read_files
from tests.support.traces import build_collective, build_inspector_log

NUM_EVENTS = 60


def build_text(indent: int | None = None) -> str:
    events = [build_event("kernel", NCCL, 100 * i, 10, lane=7, **collective_args(Seq=i)) for i in range(NUM_EVENTS)]
    info = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]}
    return json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events, "z": [{}]}, indent=indent)


def find_event(text: str, number: int) -> int:
    """Return the offset of the name of an event."""
    offset = -1
    for _ in range(number + 1):
        offset = text.index('"name"', offset + 1)
    return offset


def replace_in_event(text: str, number: int, old: str, new: str) -> str:
    start = text.index(old, find_event(text, number))
    return text[:start] + new + text[start + len(old) :]


SYNTAX_ERRORS: list[tuple[str, Callable[[str], str]]] = [
    ("a bare word", lambda text: replace_in_event(text, 20, '"dur": 10', '"dur": inf')),
    ("a missing value", lambda text: replace_in_event(text, 20, '"dur": 10', '"dur": ')),
    ("a quote in a name", lambda text: replace_in_event(text, 20, "ncclDev", 'nccl"Dev')),
    ("an unescaped backslash", lambda text: replace_in_event(text, 20, "ncclDev", "nccl\\Dev")),
    ("a missing bracket", lambda text: replace_in_event(text, 20, '"Seq": 20}', '"Seq": 20')),
    ("garbage between events", lambda text: replace_in_event(text, 19, '"Seq": 19}}, {', '"Seq": 19}}, @@, {')),
    ("a number", lambda text: replace_in_event(text, 19, '"Seq": 19}}, {', '"Seq": 19}}, 17, {')),
    ("a text as time", lambda text: replace_in_event(text, 20, '"ts": 2000', '"ts": "late"')),
    ("a negative duration", lambda text: replace_in_event(text, 20, '"dur": 10', '"dur": -10')),
    ("no duration", lambda text: replace_in_event(text, 20, '"dur": 10,', "")),
    ("a number of 5,000 digits", lambda text: replace_in_event(text, 20, '"dur": 10', '"dur": ' + "9" * 5000)),
    ("deep nesting", lambda text: replace_in_event(text, 20, '"dur": 10', '"dur": ' + "[" * 5000)),
    ("a long event", lambda text: replace_in_event(text, 20, '"dur": 10', '"dur": [' + "0," * 600_000 + "1]")),
]


@pytest.mark.parametrize(("name", "damage"), SYNTAX_ERRORS, ids=[name for name, _ in SYNTAX_ERRORS])
@pytest.mark.parametrize("is_array", [False, True])
def test_bad_event_costs_only_itself(
    tmp_path: Path, name: str, damage: Callable[[str], str], is_array: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", 3_001)  # so that values cross the borders of chunks
    monkeypatch.setattr(json_stream, "LOOKAHEAD_CHARS", 512)
    text = damage(build_text())
    path = tmp_path / "trace_rank0.json"
    path.write_text(text[text.index("[{") : text.index(', "z"')] if is_array else text)
    if is_array:
        path.write_text(damage(build_text()).split('"traceEvents": ')[1].split(', "z"')[0])
    found = read_files(path)
    lost = set(range(NUM_EVENTS)) - {call.sequence for call in found.trace.calls}
    assert lost <= {20}, "only the damaged event is missing"
    assert len(lost) == (0 if name in ("garbage between events", "a number") else 1)
    assert any("left out" in note for note in found.notes), found.notes


def test_unindented_and_indented_lines_recover(tmp_path: Path) -> None:
    """An event without its end, as a crash of the writer leaves it in the middle of merged files."""
    lines = build_text(indent=1).splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if '"ts": 2000' in line)
    path = tmp_path / "trace_rank0.json"
    path.write_text(
        "".join(lines[: start + 1] + lines[next(i for i in range(start, len(lines)) if lines[i] == "  {\n") :])
    )
    found = read_files(path)
    assert {call.sequence for call in found.trace.calls} == set(range(NUM_EVENTS)) - {20}


@pytest.mark.parametrize("indent", [None, 2])
def test_cut_file_keeps_all_complete_events(tmp_path: Path, indent: int | None) -> None:
    text = build_text(indent)
    path = tmp_path / "trace_rank0.json"
    for number in (10, 40):
        path.write_text(text[: find_event(text, number) + 30])
        found = read_files(path)
        assert len(found.trace.calls) == number
        assert found.notes == ["trace_rank0.json: the file is cut off, so its last events are missing"]


def test_array_without_end_is_complete(tmp_path: Path) -> None:
    """The Trace Event Format allows a missing bracket."""
    path = tmp_path / "trace_rank0.json"
    path.write_text("[" + ",\n".join(json.dumps(build_event("kernel", NCCL, i, 1)) for i in range(3)) + ",\n")
    found = read_files(path)
    assert len(found.trace.calls) == 3
    assert not any("cut" in note for note in found.notes)


def test_cut_gzip_keeps_all_complete_events(tmp_path: Path) -> None:
    text = build_text()
    data = gzip.compress(text.encode(), 1)
    path = tmp_path / "trace_rank0.json.gz"
    for size in (len(data) - 4, len(data) // 2):
        path.write_bytes(data[:size])
        readable = zlib.decompressobj(wbits=31).decompress(data[:size]).decode(errors="replace")
        found = read_files(path)
        assert len(found.trace.calls) == min(NUM_EVENTS, readable.count('"Seq": ')) or len(found.trace.calls) == (
            readable.count('"Seq": ') - 1
        )
        assert len(found.trace.calls) > 0
        assert [note for note in found.notes if "cut" in note] == [
            "trace_rank0.json.gz: the gzip file is cut off, so its last events are missing"
        ]


def test_damaged_gzip_keeps_events_before_the_damage(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(build_text().encode() * 50, 1))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path = tmp_path / "trace_rank0.json.gz"
    path.write_bytes(bytes(data))
    found = read_files(path)
    assert len(found.trace.calls) == NUM_EVENTS


def test_gzip_of_several_members_is_read_whole(tmp_path: Path) -> None:
    text = build_text().encode()
    path = tmp_path / "trace_rank0.json.gz"
    path.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + bytes(512))
    found = read_files(path)
    assert (len(found.trace.calls), found.notes) == (NUM_EVENTS, [])


def test_many_bad_events_are_counted(tmp_path: Path) -> None:
    text = build_text()
    for number in range(10, 20):
        text = replace_in_event(text, number, '"dur": 10', '"dur": nan')
    path = tmp_path / "trace_rank0.json"
    path.write_text(text)
    found = read_files(path)
    assert len(found.trace.calls) == NUM_EVENTS - 10
    assert any("7 further members" in note for note in found.notes)


def test_invalid_utf8_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank0.json"
    path.write_bytes(b"\xef\xbb\xbf" + build_text().encode().replace(b"RING_LL", b"RING\xff\xfe", 1))
    assert len(read_files(path).trace.calls) == NUM_EVENTS


def test_bad_lines_of_an_inspector_log_cost_only_themselves(tmp_path: Path) -> None:
    good = build_inspector_log(0, build_collective(1, 0, 5), build_collective(2, 10, 5))
    lines = good.splitlines(keepends=True)
    path = tmp_path / "i.log"
    path.write_bytes(
        b"\x00nonsense\n" + lines[0] + b'{"coll_perf": 7}\n' + b"x" * 2**21 + b"\n" + lines[1] + lines[0][:40]
    )
    found = read_files(path)
    assert [call.sequence for call in found.trace.calls] == [1, 2]
    assert any("3 further invalid items" in note for note in found.notes), found.notes


def test_bad_entry_of_a_flight_recorder_dump_costs_only_itself(tmp_path: Path) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "time_created_ns": 5}
    path = tmp_path / "dump_rank_0.json"
    path.write_text(json.dumps({"entries": [entry, {**entry, "time_created_ns": "x"}, 7, entry]}))
    found = read_files(path)
    assert [call.payload_bytes for call in found.trace.calls] == [None, None]
    assert any("entries[1].time_created_ns is left out, and 1 further" in note for note in found.notes)
