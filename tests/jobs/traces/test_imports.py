"""Read traces of other programs: real traces of torch, and invalid ones."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.runs.traces.imports import trace_files
from jobs.runs.traces.imports.common import ImportProblemError, parse_axis, parse_op, parse_rank
from jobs.runs.traces.imports.reader import ImportResult, read_traces
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import find_arrivals
from tests.jobs.traces.hostile import HOSTILE, shared
from tests.support.traces import (
    build_collective,
    build_header,
    build_inspector_dump,
    build_inspector_log,
    build_metadata,
)


def read_files(*paths: Path) -> ImportResult:
    return read_traces([TraceFile(path.name, path) for path in paths])


def write_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("ending", ["", ".json"])
def test_reads_flight_recorder_dump(trace_folder: Path, ending: str) -> None:
    found = read_files(*(trace_folder / f"fr_rank_{rank}{ending}" for rank in (0, 1)))
    assert found.format == "flight recorder"
    counts = Counter((call.rank, call.axis, call.op) for call in found.trace.calls)
    for rank in (0, 1):
        assert counts[rank, "tp", "all_reduce"] == 3, "the group's description names its axis"
        assert counts[rank, "world", "all_gather"] == 3
    assert {call.payload_bytes for call in found.trace.calls if call.op == "all_reduce"} == {4000}
    assert {call.payload_bytes for call in found.trace.calls if call.op == "all_gather"} == {80}
    assert {call.ranks for call in found.trace.calls} == {(0, 1)}
    assert len(find_arrivals(found.trace.calls)) == len(found.trace.calls), "every collective finds its other half"
    assert found.notes == ["collectives without a recorded end time are shown as points"]


@pytest.mark.parametrize("is_gzip", [False, True])
def test_reads_profiler_trace(trace_folder: Path, tmp_path: Path, is_gzip: bool) -> None:
    paths = [trace_folder / f"kineto_{rank}.json" for rank in (0, 1)]
    if is_gzip:
        paths = [write_file(tmp_path, f"{path.name}.gz", gzip.compress(path.read_bytes())) for path in paths]
    found = read_files(*paths)
    assert found.format == "Kineto"
    assert Counter(call.op for call in found.trace.calls) == {"all_reduce": 12, "all_gather": 6}
    assert all(call.ended is not None and call.ended > call.issued for call in found.trace.calls)
    assert abs(found.trace.began - (trace_folder / "kineto_0.json").stat().st_mtime) < 600, "unix seconds"
    assert {span.rank for span in found.trace.spans} == {0, 1}
    assert found.notes


def gpu_trace(rank: int) -> bytes:
    """Return a made-up trace of communication kernels (torch/csrc/distributed/c10d/ParamCommsUtils)."""
    noted = {
        "Collective name": "_allgather_base",
        "In msg nelems": 8,
        "Out msg nelems": 16,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Description": "mesh_dp",
        "Process Group Ranks": "[0, 1]",
    }
    base = {"ph": "X", "pid": 0, "tid": 7}
    events = [
        {**base, "name": "ProfilerStep#11", "cat": "user_annotation", "ts": 100, "dur": 50},
        {**base, "name": "ProfilerStep#12", "cat": "user_annotation", "ts": 150, "dur": 50},
        {**base, "name": "ncclDevKernel_AllGather", "cat": "kernel", "ts": 110 + 5 * rank, "dur": 20, "args": noted},
        {**base, "name": "record_param_comms", "cat": "cpu_op", "ts": 105, "dur": 1, "args": noted},
        {**base, "name": "gemm", "cat": "kernel", "ts": 100, "dur": 8},
        {**base, "name": "gemm", "cat": "kernel", "ts": 112, "dur": 8},
        {**base, "name": "gemm", "cat": "kernel", "ts": 160, "dur": 8},
    ]
    told = {"distributedInfo": {"rank": rank, "pg_config": []}, "baseTimeNanoseconds": 10**18, "traceEvents": events}
    return json.dumps(told).encode()


def test_reads_group_bytes_and_step_of_gpu_kernels(tmp_path: Path) -> None:
    found = read_files(*(write_file(tmp_path, f"r{rank}.json", gpu_trace(rank)) for rank in (0, 1)))
    first, second = found.trace.calls
    assert (first.op, first.axis, first.ranks, first.payload_bytes) == ("all_gather", "dp", (0, 1), 32)
    assert (first.step, first.issued) == (11, pytest.approx(1e9 + 110e-6))
    assert {arrival.rank for arrival in find_arrivals([first, second]).values()} == {1}
    mine = [(span.step, round((span.began - 1e9) * 1e6)) for span in found.trace.spans if span.rank == 0]
    assert mine == [(11, 100), (11, 112), (12, 160)]
    assert all("launch" in note for note in found.notes), "the made-up kernels have no launch"


def test_numbers_sends_separately(tmp_path: Path) -> None:
    """After the first send, collectives of different ranks were matched wrongly."""
    noted = {"Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"}
    numbers = []
    for rank, ops in enumerate((["allreduce"] * 2, ["send", "allreduce", "recv", "allreduce"])):
        events = [
            {"ph": "X", "name": "k", "cat": "kernel", "ts": ts, "dur": 1, "args": {**noted, "Collective name": op}}
            for ts, op in enumerate(ops)
        ]
        told = {"distributedInfo": {"rank": rank}, "traceEvents": events}
        found = read_files(write_file(tmp_path, f"r{rank}.json", json.dumps(told).encode()))
        numbers.append([call.sequence for call in found.trace.calls if call.op == "all_reduce"])
    assert numbers == [[1, 2], [1, 2]]


def write_messages(tmp_path: Path, rank: int, group: str, messages: list[tuple[int, str]]) -> Path:
    """Write a Kineto trace with (step, operation) of sends and receives."""
    noted = {"Process Group Name": "0", "Process Group Description": "pp", "Process Group Ranks": group}
    kernel = {"ph": "X", "name": "k", "cat": "kernel", "dur": 1}
    events = [
        {"ph": "X", "name": f"ProfilerStep#{step}", "cat": cat, "ts": 1000 * step, "dur": 900}
        for step in (1, 2)
        for cat in ("user_annotation", "gpu_user_annotation")
    ] + [
        {**kernel, "ts": 1000 * step + 10 * place + rank, "args": {**noted, "Collective name": op}}
        for place, (step, op) in enumerate(messages, start=1)
    ]
    trace = {"distributedInfo": {"rank": rank}, "traceEvents": events}
    return write_file(tmp_path, f"m{rank}.json", json.dumps(trace).encode())


def test_messages_of_two_ranks_pair_in_each_step(tmp_path: Path) -> None:
    found = read_files(
        write_messages(tmp_path, 0, "[0, 1]", [(1, "send"), (1, "send"), (2, "send")]),
        write_messages(tmp_path, 1, "[0, 1]", [(1, "recv"), (1, "recv"), (2, "recv")]),
    )
    assert [(call.rank, call.peer, call.sequence) for call in found.trace.calls if call.op == "send"] == [
        (0, 1, 1),
        (0, 1, 2),
        (0, 1, 3),
    ]
    arrivals = find_arrivals(found.trace.calls)
    assert len(arrivals) == 6
    assert {arrival.rank for arrival in arrivals.values()} == {1}
    assert not any("partner" in note for note in found.notes)


def test_messages_without_a_partner_are_noted(tmp_path: Path) -> None:
    lost = read_files(
        write_messages(tmp_path, 0, "[0, 1]", [(1, "send"), (2, "send"), (2, "send")]),
        write_messages(tmp_path, 1, "[0, 1]", [(1, "recv"), (2, "recv")]),
    )
    text = "send from rank 0 to rank 1 of pp: 1 without a partner in step 2, so waiting times are unknown"
    assert text in lost.notes
    alone = read_files(write_messages(tmp_path, 0, "[0, 1]", [(1, "send")]))
    assert not any("partner" in note for note in alone.notes), "the trace of the other rank was not imported"
    many = read_files(write_messages(tmp_path, 0, "[0, 1, 2]", [(1, "send"), (2, "recv")]))
    text = "the traces do not name the peers of 2 sends and receives of pp, so their waiting times are unknown"
    assert text in many.notes


@pytest.mark.parametrize("form", [build_inspector_log, build_inspector_dump])
def test_reads_both_versions_of_inspector_logs(tmp_path: Path, form: Callable[..., bytes]) -> None:
    paths = []
    for rank in (0, 1):
        told = [build_collective(1, 100 + 30 * rank, 50), build_collective(2, 300, 20, op="ReduceScatter", size=1000)]
        paths.append(write_file(tmp_path, f"node-1-pid{100 + rank}.log", form(rank, *told)))
    found = read_files(*paths)
    assert found.format == "NCCL Inspector"
    reduced = [call for call in found.trace.calls if call.op == "all_reduce"]
    assert [(call.rank, call.ranks, call.payload_bytes) for call in reduced] == [(0, (0, 1), 4096), (1, (0, 1), 4096)]
    assert reduced[1].issued - reduced[0].issued == pytest.approx(30e-6, abs=1e-6)
    assert {call.payload_bytes for call in found.trace.calls if call.op == "reduce_scatter"} == {2000}
    assert {arrival.rank for arrival in find_arrivals(reduced).values()} == {1}
    assert found.notes == []


def test_limits_payload_bytes_of_inspector_logs(tmp_path: Path) -> None:
    line = {"header": build_header(0, ranks=16), "metadata": build_metadata(0)}
    line["coll_perf"] = build_collective(1, 0, 9, op="AllGather", size=2**60)
    (call,) = read_files(write_file(tmp_path, "a.log", json.dumps(line).encode())).trace.calls
    assert call.payload_bytes == 2**62


def test_notes_inspector_log_without_times(tmp_path: Path) -> None:
    told = {**build_collective(1, 0, 50), "event_trace_ts": None}
    found = read_files(write_file(tmp_path, "a.log", build_inspector_log(0, told)))
    assert found.trace.calls[0].ended == pytest.approx(1_752_867_230.0)
    assert "NCCL_INSPECTOR_DUMP_VERBOSE" in found.notes[0]


def test_ranks_come_from_the_largest_communicator(tmp_path: Path) -> None:
    def line(rank: int, comm: str, place: int, size: int, number: int) -> bytes:
        told = {
            "header": build_header(place, comm, size),
            "metadata": build_metadata(rank),
            "coll_perf": build_collective(number, 0, 9),
        }
        return json.dumps(told).encode() + b"\n"

    paths = [
        write_file(
            tmp_path, f"{rank}.log", line(rank, "0xaa", rank, 4, 1) + line(rank, f"0xb{rank % 2}", rank // 2, 2, 1)
        )
        for rank in range(4)
    ]
    groups = {(call.axis, call.ranks) for call in read_files(*paths).trace.calls}
    assert groups == {("comm 0xaa", (0, 1, 2, 3)), ("comm 0xb0", (0, 2)), ("comm 0xb1", (1, 3))}


def test_peer_of_a_send_is_a_world_rank(tmp_path: Path) -> None:
    """Ranks 1 and 3 are 0 and 1 in their own communicator."""
    paths = []
    for rank in range(4):
        lines = [
            {
                "header": build_header(rank, ranks=4),
                "metadata": build_metadata(rank),
                "coll_perf": build_collective(1, 0, 9),
            }
        ]
        if rank in (1, 3):
            figures = {"p2p_sn": 1, "p2p_msg_size_bytes": 8, "p2p_exec_time_us": 5}
            told = {"p2p": "Send" if rank == 1 else "Recv", **figures, "p2p_peer": int(rank == 1)}
            lines.append(
                {"header": build_header(rank // 2, "0xbb"), "metadata": build_metadata(rank), "p2p_perf": told}
            )
        paths.append(write_file(tmp_path, f"{rank}.log", b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    pairs = [call for call in read_files(*paths).trace.calls if call.axis == "comm 0xbb"]
    assert sorted((call.rank, call.peer, call.op, call.ranks) for call in pairs) == [
        (1, 3, "send", (1, 3)),
        (3, 1, "recv", (1, 3)),
    ]


FR: dict[str, Any] = {"profiling_name": "gloo:all_reduce", "collective_seq_id": 1, "process_group": ["0", "x"]}


def dumped(**changes: Any) -> bytes:
    return pickle.dumps({"entries": [{**FR, "time_created_ns": 5, **changes}]}, 2)


BAD: list[tuple[str, bytes, str, str]] = [
    ("a.json", b"", "file", "The file is empty."),
    ("a.txt", b"hello", "format", "The file format is unknown."),
    ("a.json", b'{"what": 1}', "format", "The keys of the file are 'what'."),
    ("dump.json", b'{"entries": []}', "name", "End the file name with the rank number."),
    ("r0.json", b'{"entries": [7]}', "entries[0]", "The entry of the dump is not a JSON object."),
    ("r0.json", json.dumps({"entries": [FR]}).encode(), "entries[0].time_created_ns", "whole number"),
    ("r0.json", json.dumps({"entries": [{**FR, "time_created_ns": -5}]}).encode(), "entries[0].time_created_ns", "-5"),
    ("r0.json", b'{"entries": [', "events", "the file is cut off"),
    (
        "r0.json",
        json.dumps({"entries": [{**FR, "profiling_name": ["x"]}]}).encode(),
        "entries[0].profiling_name",
        "list",
    ),
    ("r0", dumped(profiling_name=shared(20)), "entries[0].profiling_name", "The value is a tuple, but"),
    ("r0", dumped(process_group=(shared(20), "x")), "entries[0].process_group", "The value is a tuple, but"),
    (
        "r0",
        dumped(process_group=("0", "\ud800x")),
        "entries[0].process_group",
        "Unicode text without NUL characters is expected.",
    ),
    (
        "r0",
        dumped(profiling_name="nccl:\ud800"),
        "entries[0].profiling_name",
        "Unicode text without NUL characters is expected.",
    ),
    ("r0", dumped(profiling_name="x" * 1001), "entries[0].profiling_name", "at most 1000 characters"),
    ("r0", dumped(collective_seq_id=10**5000), "pickle", "a number of 16,610 bits"),
    ("r0", dumped(collective_seq_id=shared(60)), "pickle", "more than 4,000,000 values"),
    ("k0.json", b'{"schemaVersion": 1, "traceEvents": [{"name": "\\udfff"}]}', "events", "no events of collectives"),
    ("k0.json", b'{"\\udfff": 1}', "format", "The file format is unknown."),
    ("r0", HOSTILE["global"].replace(b"c", b"\x80\x02c", 1), "pickle", "GLOBAL"),
    ("k0.json", b'{"traceEvents": []}', "events", "no events of collectives or compute"),
    ("k0.json", b'{"traceEvents": [3]}', "events", "traceEvents[0]: the event is not a JSON object"),
    ("k0.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "a"}]}', "events", "traceEvents[0].ts is 'a'"),
    ("k0.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -1}]}', "events", "dur is -1"),
    ("k0.json", b'{"schemaVersion": 1, "traceEvents": [{"ph"', "events", "the file is cut off"),
    ("k0.json.gz", gzip.compress(gpu_trace(0))[:12], "gzip", "The file cannot be decompressed"),
    ("r0", dumped(time_created_ns=9 * 10**18), "time", "An event at Unix time 9e+09 s"),
    ("i.log", b'{"header": {}}\n{"coll_perf": 3}\n', "line 2: header", "The field is missing"),
    ("i.log", build_inspector_log(0, {"coll_sn": 1}), "line 1: coll_perf.coll_msg_size_bytes", "whole number"),
]


@pytest.mark.parametrize(("name", "data", "field", "words"), BAD, ids=[f"{name}: {field}" for name, _, field, _ in BAD])
def test_reports_file_and_field_of_errors(tmp_path: Path, name: str, data: bytes, field: str, words: str) -> None:
    with pytest.raises(ImportProblemError) as told:
        read_files(write_file(tmp_path, name, data))
    assert (told.value.file, told.value.field) == (name, field)
    assert words in told.value.message


def test_rejects_duplicate_ranks_and_mixed_formats(trace_folder: Path, tmp_path: Path) -> None:
    again = write_file(tmp_path, "copy_rank_0", (trace_folder / "fr_rank_0").read_bytes())
    with pytest.raises(
        ImportProblemError, match=r"copy_rank_0: rank: This file is from rank 0, like the file fr_rank_0"
    ):
        read_files(trace_folder / "fr_rank_0", again)
    with pytest.raises(
        ImportProblemError, match="format: The format is Kineto, but fr_rank_0 has the format flight recorder"
    ):
        read_files(trace_folder / "fr_rank_0", trace_folder / "kineto_1.json")


def test_limits_decompressed_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_DECOMPRESSED_BYTES", 2**20)
    bomb = write_file(tmp_path, "k0.json.gz", gzip.compress(b'{"schemaVersion": 1, "traceEvents": [' + b" " * 2**24))
    assert bomb.stat().st_size < 2**16
    with pytest.raises(ImportProblemError, match=r"The decompressed file has more than 1,048,576 bytes."):
        read_files(bomb)


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:ALLTOALL_BASE", "all_to_all"),
        ("nccl:send 0->1", "send"),
        ("gloo:all_reduce", "all_reduce"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("AllReduce", "all_reduce"),
        ("nccl:coalesced", "coalesced"),
    ],
)
def test_normalizes_names_of_collectives(text: str, op: str) -> None:
    assert parse_op(text) == op


def test_parses_axis_from_group_description() -> None:
    assert parse_axis("4", "mesh_tp") == "tp"
    assert parse_axis("0", "default_pg") == "world"
    assert parse_axis("4", "updates") == "updates", "no dp is meant"
    assert parse_axis("4", "undefined") == "group 4"


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("run2_rank11.json.gz", 11),
        ("trace.json", None),
        ("trace_rank_000003.json", 3),
        ("node-1_rank_65535", 65_535),
        ("trace_rank_65536.json", None),
        ("gpu01_4242.1718000000123456789.pt.trace.json", None),
        ("trace_rank3_20260101.json", 3),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("worker2_step_12.1694128201554.pt.trace.json", 2),
        ("rank5_gpu-host-12.json", 5),
        ("gpu-host-12_rank_5.json", 5),
        ("node7_local_rank1_rank9.json", 9),
        ("gpu-node-12.json", None),
        ("ip-10-0-0-12.json", None),
        ("dgx07.json", None),
        ("trace-3.json", 3),
        ("trace3.json", 3),
        ("3.json", 3),
        ("step_100.json", None),
        ("trainer-1_4242.1718000000123.pt.trace.json.gz", None),
        ("trace_rank_٣.json", None),
    ],
)
def test_parses_rank_from_file_name(name: str, rank: int | None) -> None:
    """The last digits of a time or date are not a rank."""
    assert parse_rank(name) == rank
