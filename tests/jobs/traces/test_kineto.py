"""Import Kineto traces, and check the step, the process group, and the unknown values of collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.runs.traces.trace_events import find_arrivals
from tests.jobs.traces.kineto_builder import (
    NCCL,
    build_event,
    build_launch,
    build_step,
    collective_args,
    read_files,
    write_trace,
)


def get_times_us(calls: Any) -> list[float | None]:
    return [None if call.ended is None else round((call.ended - call.issued) * 1e6, 3) for call in calls]


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", "all_gather"),
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "collective"),
        ("mscclKernel_Sum_float_Simple_true(ncclDevComm*)", "collective"),
        ("void gemm<ncclish>(float*)", None),
    ],
)
def test_recognizes_communication_kernels_by_name(tmp_path: Path, kernel: str, op: str | None) -> None:
    events = [build_event("kernel", kernel, 100, 50), build_event("kernel", "gemm", 10, 5)]
    trace = read_files(write_trace(tmp_path, 0, events)).trace
    assert [call.op for call in trace.calls] == ([] if op is None else [op])
    assert len(trace.spans) == (2 if op is None else 1), "communication kernels do not count as compute"


def test_kernel_time_never_comes_from_the_launch_annotation(tmp_path: Path) -> None:
    events = [
        build_event("user_annotation", "nccl:all_reduce", 10, 50, lane=9),
        build_event("gpu_user_annotation", "nccl:all_reduce", 100, 10_000),
        build_event("kernel", NCCL, 100, 10_000),
    ]
    calls = read_files(write_trace(tmp_path, 0, events)).trace.calls
    assert get_times_us(calls) == [10_000]


def test_launches_without_kernels_have_unknown_durations(tmp_path: Path) -> None:
    """The launch on the CPU took 50 microseconds, which is not the duration of the collective."""
    events = [
        build_event("cpu_op", "record_param_comms", 5, 60, lane=9, **collective_args()),
        build_event("user_annotation", "nccl:all_reduce", 10, 50, lane=9),
        build_event("kernel", "gemm", 10, 5),
    ]
    found = read_files(write_trace(tmp_path, 0, events))
    assert [(call.ended, call.payload_bytes) for call in found.trace.calls] == [(None, 4000)]
    assert any("no communication kernels" in note for note in found.notes)


@pytest.mark.parametrize("link", ["External id", "correlation", "gpu_user_annotation"])
def test_kernel_belongs_to_the_step_of_its_launch(tmp_path: Path, link: str) -> None:
    """The device runs one and a half steps behind the host."""
    events: list[Any] = []
    for step in (1, 2, 3):
        began = 10_000 * step
        events.append(build_step(step, began, 9_990))
        kernel = build_event("kernel", NCCL, began + 15_500, 3_000)
        gemm = build_event("kernel", "gemm", began + 15_000, 400)
        if link == "External id":
            args = {"External id": step}
            events.append(
                build_event("cpu_op", "record_param_comms", began + 100, 5, lane=9, **args, **collective_args())
            )
            kernel["args"] = gemm["args"] = args
        elif link == "correlation":
            events.append(build_launch(step, began + 100))
            kernel["args"] = gemm["args"] = {"correlation": step}
        else:
            events.append(build_event("gpu_user_annotation", f"ProfilerStep#{step}", began + 15_000, 4_000))
        events += [kernel, gemm]
    trace = read_files(write_trace(tmp_path, 0, events)).trace
    assert [call.step for call in trace.calls] == [1, 2, 3]
    assert [span.step for span in trace.spans] == [1, 2, 3]


def test_kernel_launched_before_the_recording_is_in_the_step_before(tmp_path: Path) -> None:
    """A real trace of an MI300 begins with five all-reduces of the step before."""
    events = [
        build_step(15, 1_000, 900),
        build_step(16, 2_000, 900),
        build_launch(500, 1_100),
        build_launch(501, 2_100),
        build_event("kernel", NCCL, 1_200, 50, correlation=499),
        build_event("kernel", NCCL, 2_150, 50, correlation=500),
        build_event("kernel", NCCL, 2_250, 50, correlation=501),
    ]
    found = read_files(write_trace(tmp_path, 0, events))
    assert [call.step for call in found.trace.calls] == [14, 15, 16]
    assert any("before the first recorded step" in note for note in found.notes)


def test_step_by_time_has_a_note(tmp_path: Path) -> None:
    events = [build_step(1, 0, 100), build_step(2, 100, 100), build_event("kernel", NCCL, 150, 10)]
    found = read_files(write_trace(tmp_path, 0, events))
    assert [call.step for call in found.trace.calls] == [2]
    assert any("the launch of 1 kernel is not recorded" in note for note in found.notes)


def test_merged_compute_stays_in_its_step(tmp_path: Path) -> None:
    """Kernels of a busy GPU were merged across all steps into one interval of the first step."""
    events = [build_step(1, 0, 100), build_step(2, 100, 100)]
    for correlation, step in ((1, 0), (2, 100)):
        events += [
            build_launch(correlation, step + 1),
            build_event("kernel", "k", step + 50, 50, correlation=correlation),
        ]
    events.append(build_event("kernel", "k", 100, 50, correlation=1))
    spans = read_files(write_trace(tmp_path, 0, events)).trace.spans
    assert [(span.step, round((span.ended - span.began) * 1e6)) for span in spans] == [(1, 100), (2, 50)]


def test_unnamed_kernel_gets_operation_and_bytes_from_its_launch(tmp_path: Path) -> None:
    comms = build_event("cpu_op", "record_param_comms", 5, 60, lane=9, **collective_args("1", "mesh_tp"))
    events = [
        comms,
        build_event("user_annotation", "nccl:all_reduce", 10, 50, lane=9),
        build_launch(3, 20),
        build_event("kernel", "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 100, 10, correlation=3),
    ]
    (call,) = read_files(write_trace(tmp_path, 0, events)).trace.calls
    assert (call.op, call.axis, call.ranks, call.payload_bytes) == ("all_reduce", "tp", (0, 1), 4000)


def test_kernels_of_one_launch_do_not_repeat_its_bytes(tmp_path: Path) -> None:
    events = [build_event("cpu_op", "record_param_comms", 5, 60, lane=9, **collective_args()), build_launch(3, 20)]
    events += [build_event("kernel", NCCL, ts, 10, correlation=3) for ts in (100, 110)]
    calls = read_files(write_trace(tmp_path, 0, events)).trace.calls
    assert [call.payload_bytes for call in calls] == [None, None]


def test_unknown_bytes_are_not_zero(tmp_path: Path) -> None:
    events = [
        build_event("kernel", NCCL, 100, 10),
        build_event("kernel", NCCL, 200, 10, **collective_args(dtype="Mystery")),
        build_event("kernel", NCCL, 300, 10, **collective_args(**{"In msg nelems": 0, "Out msg nelems": 0})),
    ]
    found = read_files(write_trace(tmp_path, 0, events))
    assert [call.payload_bytes for call in found.trace.calls] == [None, None, 0]
    assert any("sizes are missing for 2 of 3 collectives" in note for note in found.notes)


def test_exposed_time_is_the_time_without_compute(tmp_path: Path) -> None:
    events = [
        build_event("kernel", NCCL, 100, 100, lane=20, **collective_args()),
        build_event("kernel", "gemm", 90, 30),
        build_event("kernel", "gemm", 110, 30),
        build_event("kernel", "gemm", 190, 30),
    ]
    (call,) = read_files(write_trace(tmp_path, 0, events)).trace.calls
    assert call.blocked_s == pytest.approx(50e-6)


def test_gloo_collectives_have_no_bytes_and_no_exposed_time(trace_folder: Path) -> None:
    """The page showed 0 B and "overlapped 100%"."""
    found = read_files(trace_folder / "kineto_0.json", trace_folder / "kineto_1.json")
    assert {(call.payload_bytes, call.blocked_s) for call in found.trace.calls} == {(None, None)}
    assert all(call.ended is not None for call in found.trace.calls)


def test_gloo_collectives_count_in_a_trace_with_kernels(tmp_path: Path) -> None:
    events = [
        build_event("user_annotation", "gloo:all_reduce", 10, 500, lane=3),
        build_event("kernel", NCCL, 100, 10, **collective_args()),
    ]
    assert get_times_us(read_files(write_trace(tmp_path, 0, events)).trace.calls) == [500, 10]


def test_pairs_by_sequence_number(tmp_path: Path) -> None:
    """Rank 1 began to record after the first collective, so the order of its collectives matches other numbers."""
    paths = []
    for rank, sequences in ((0, (7, 8, 9)), (1, (8, 9))):
        events = [
            build_event("kernel", NCCL, 100 * number + rank, 50, **collective_args(Seq=number)) for number in sequences
        ]
        paths.append(write_trace(tmp_path, rank, events))
    calls = read_files(*paths).trace.calls
    arrivals = find_arrivals(calls)
    met = {
        (call.rank, call.sequence): arrivals.get((call.rank, call.group, call.sequence, call.op, -1)) for call in calls
    }
    assert met.pop((0, 7)) is None
    assert {(key, arrival and arrival.rank) for key, arrival in met.items()} == {
        ((rank, number), 1) for rank in (0, 1) for number in (8, 9)
    }


def test_sequence_number_comes_from_the_launch(tmp_path: Path) -> None:
    args = {"External id": 4}
    events = [
        build_event("cpu_op", "record_param_comms", 5, 60, lane=9, **args, **collective_args(Seq=31)),
        build_event("kernel", NCCL, 100, 10, **args, **collective_args()),
    ]
    (call,) = read_files(write_trace(tmp_path, 0, events)).trace.calls
    assert call.sequence == 31


def test_groups_of_equal_description_and_ranks_stay_apart(tmp_path: Path) -> None:
    """Both groups are "mesh_dp" over ranks 0 and 1, and each counts its own sequence numbers."""
    paths = []
    for rank in (0, 1):
        events = [
            build_event("kernel", NCCL, began + rank, 5, **collective_args(group, "mesh_dp", Seq=1))
            for group, began in (("3", 100), ("5", 900))
        ]
        paths.append(write_trace(tmp_path, rank, events))
    calls = read_files(*paths).trace.calls
    assert sorted({call.nth for call in calls}) == [0, 1]
    waits = sorted(
        arrival.time - call.issued
        for call in calls
        for arrival in [find_arrivals(calls)[(call.rank, call.group, call.sequence, call.op, -1)]]
    )
    assert waits == pytest.approx([0, 0, 1e-6, 1e-6])


def test_different_orders_without_sequence_numbers_are_not_paired(tmp_path: Path) -> None:
    gather = collective_args(**{"Collective name": "_allgather_base"})
    orders = ([gather, collective_args()], [collective_args()])
    paths = [
        write_trace(
            tmp_path, rank, [build_event("kernel", NCCL, 100 + 50 * i, 9, **args) for i, args in enumerate(order)]
        )
        for rank, order in enumerate(orders)
    ]
    found = read_files(*paths)
    assert find_arrivals(found.trace.calls) == {}
    assert any("waiting times of these collectives are unknown" in note for note in found.notes)


def test_ranks_come_from_start_and_stride(tmp_path: Path) -> None:
    args = {"Process Group Name": "9", "Process Group Ranks": "[1, 3, ...]"}
    args |= {"Global rank start": 1, "Global rank stride": 2, "Group size": 3}
    (call,) = read_files(
        write_trace(tmp_path, 1, [build_event("kernel", NCCL, 1, 1, **collective_args(**args))])
    ).trace.calls
    assert call.ranks == (1, 3, 5)


@pytest.mark.parametrize("key", ["metadata", "x", "traceName"])
def test_format_and_info_do_not_depend_on_the_order_of_keys(tmp_path: Path, key: str) -> None:
    info = {"rank": 1, "world_size": 2, "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]}
    trace = {key: {"any": [1, {"traceEvents": [5]}]}, "traceEvents": [build_event("kernel", NCCL, 5, 5)]}
    path = tmp_path / "noname.json"
    path.write_text(json.dumps({**trace, "baseTimeNanoseconds": 10**18, "distributedInfo": info}))
    (call,) = read_files(path).trace.calls
    assert (call.rank, call.ranks, round(call.issued)) == (1, (0, 1), 10**9)


def test_reads_a_bare_array_and_a_trace_of_one_gpu(tmp_path: Path) -> None:
    events = [build_event("kernel", "gemm", 5, 5)]
    for name, text in (
        ("host-7.json", json.dumps(events)),
        ("model__1016002.json", json.dumps({"traceEvents": events})),
    ):
        path = tmp_path / name
        path.write_text(text)
        found = read_files(path)
        assert (found.format, found.trace.get_ranks()) == ("Kineto", [0])
        assert any("do not contain the rank" in note for note in found.notes)


def test_unknown_ranks_of_several_files_follow_their_names(tmp_path: Path) -> None:
    paths = [tmp_path / f"host{name}_4{name}2.1718000000123.pt.trace.json" for name in (2, 1)]
    for path in paths:
        path.write_text(json.dumps([build_event("kernel", "gemm", 5, 5 + (path == paths[1]))]))
    found = read_files(*paths)
    assert {span.rank: round((span.ended - span.began) * 1e6) for span in found.trace.spans} == {0: 6, 1: 5}
    assert len(found.notes) >= 2


def test_reads_categories_of_old_traces(tmp_path: Path) -> None:
    events = [build_event("Kernel", NCCL, 5, 5), build_event("Memcpy", "Memcpy HtoD", 1, 2)]
    trace = read_files(write_trace(tmp_path, 0, events)).trace
    assert get_times_us(trace.calls) == [5]
    assert [span.work for span in trace.spans] == ["copy"]


def test_sum_of_short_kernels_is_exact_at_times_since_1970(tmp_path: Path) -> None:
    """Floats of seconds since 1970 have steps of 0.24 microseconds, which added 2% to kernels of 3.5 microseconds."""
    events = [build_event("kernel", NCCL, 10 * i, 3.5, **collective_args()) for i in range(1000)]
    trace = read_files(write_trace(tmp_path, 0, events, baseTimeNanoseconds=1_759_276_800 * 10**9)).trace
    assert sum(call.ended - call.issued for call in trace.calls if call.ended) == pytest.approx(3.5e-3, rel=1e-4)
