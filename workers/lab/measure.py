"""Time, check and count each primitive at each size, and record it once on small tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.collectives import (
    MAX_STEP_RANKS,
    LabPoint,
    LabRankValues,
    LabStep,
    compute_bandwidths,
    compute_lab_sizes,
    get_metered_op,
)
from planner.facts.spec import LabPrimitive, LabSpec
from workers.device import synchronize
from workers.lab.primitives import (
    PrimitiveCall,
    RankContext,
    build_call,
    build_expected,
    count_mismatches,
    fill_readable,
)
from workers.meter import Recorder

STEP_ELEMENTS = 4


class LabGroup(NamedTuple):
    """The benchmarked group, and an unmetered gloo group of the same ranks for coordination."""

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    recorder: Recorder


class RankMeasurement(NamedTuple):
    """Result of one rank at one size."""

    spans: list[tuple[float, float]]  # start and end of each iteration
    checked: int
    wrong: int
    payload_bytes: int
    algorithmic_bytes: int


def measure_points(
    lab_group: LabGroup, context: RankContext, lab: LabSpec, log: Callable[[str], None]
) -> Iterator[LabPoint]:
    """Yield all points on the first rank of the group, and none on the others."""
    element_bytes = torch.empty(0, dtype=context.dtype).element_size()
    for index, primitive in enumerate(lab.primitives, start=1):
        log(f"{index}/{len(lab.primitives)}: {primitive} over {context.size} ranks")
        for num_bytes in [0] if primitive == "barrier" else compute_lab_sizes(lab, context.size):
            measurements = _all_gather_objects(
                lab_group, _measure_rank(lab_group, context, lab, primitive, num_bytes // element_bytes)
            )
            if context.group_rank == 0:
                yield _build_point(primitive, num_bytes, measurements)


def _measure_rank(
    lab_group: LabGroup, context: RankContext, lab: LabSpec, primitive: LabPrimitive, full: int
) -> RankMeasurement:
    call = build_call(primitive, lab_group.group, context, full)
    expected = build_expected(primitive, context, full)
    for _ in range(lab.warmup):
        _time_call(call, lab_group, context.device)
    payload, algorithmic = _get_metered_bytes(lab_group, primitive)
    spans, wrong = [], 0
    for _ in range(lab.iterations):
        spans.append(_time_call(call, lab_group, context.device))
        wrong += count_mismatches(call.output, expected)
    payload_after, algorithmic_after = _get_metered_bytes(lab_group, primitive)
    return RankMeasurement(
        spans=spans,
        checked=0 if expected is None else expected.numel() * lab.iterations,
        wrong=wrong,
        payload_bytes=(payload_after - payload) // lab.iterations,
        algorithmic_bytes=round((algorithmic_after - algorithmic) / lab.iterations),
    )


def _time_call(call: PrimitiveCall, lab_group: LabGroup, device: torch.device) -> tuple[float, float]:
    """Return start and end of a call on restored buffers. Ranks of a host share this monotonic clock."""
    call.reset()
    synchronize(device)
    dist.barrier(lab_group.control)
    started = time.perf_counter()
    call.run()
    synchronize(device)
    return started, time.perf_counter()


def _get_metered_bytes(lab_group: LabGroup, primitive: LabPrimitive) -> tuple[int, int]:
    """Return the payload and algorithmic bytes that the meter of this rank counted so far for a primitive."""
    op = get_metered_op(primitive)
    cells = [c for c in lab_group.recorder.get_cells("step") if c["op"] == op]
    return sum(c["payload_bytes"] for c in cells), sum(c["algorithmic_bytes"] for c in cells)


def _all_gather_objects(lab_group: LabGroup, value: Any) -> list[Any]:
    """Return the values of all ranks of the group, in order."""
    values: list[Any] = [None] * lab_group.control.size()
    dist.all_gather_object(values, value, group=lab_group.control)
    return values


def _build_point(primitive: LabPrimitive, num_bytes: int, measurements: list[RankMeasurement]) -> LabPoint:
    iterations = list(zip(*(rank.spans for rank in measurements), strict=True))
    seconds = statistics.median(max(end - start for start, end in spans) for spans in iterations)
    algbw, busbw = compute_bandwidths(primitive, num_bytes, seconds, len(measurements)) if num_bytes else (None, None)
    checked, wrong = sum(rank.checked for rank in measurements), sum(rank.wrong for rank in measurements)
    if primitive == "barrier":  # no rank may leave before the last rank arrives
        checked = len(iterations) * len(measurements)
        wrong = sum(end < max(start for start, _ in spans) for spans in iterations for _, end in spans)
    return LabPoint(
        primitive=primitive,
        num_bytes=num_bytes,
        seconds=seconds,
        algbw=algbw,
        busbw=busbw,
        checked=checked,
        wrong=wrong,
        payload_bytes=max(rank.payload_bytes for rank in measurements),
        algorithmic_bytes=max(rank.algorithmic_bytes for rank in measurements),
    )


def record_steps(lab_group: LabGroup, context: RankContext, primitives: list[LabPrimitive]) -> Iterator[LabStep]:
    """Yield the buffers of all ranks before and after each primitive, on the first rank of the group."""
    if context.size > MAX_STEP_RANKS:
        return
    small = context._replace(dtype=torch.float32, fill=fill_readable)
    full = -(-STEP_ELEMENTS // context.size) * context.size
    for primitive in primitives:
        call = build_call(primitive, lab_group.group, small, full)
        before = None if call.source is None else call.source.tolist()
        span = _time_call(call, lab_group, context.device)
        after = None if call.output is None else call.output.tolist()
        measurements = _all_gather_objects(lab_group, (before, after, span))
        if context.group_rank == 0:
            yield LabStep(primitive=primitive, holdings=tuple(_build_holdings(primitive, context.ranks, measurements)))


def _build_holdings(
    primitive: LabPrimitive, ranks: tuple[int, ...], measurements: list[Any]
) -> Iterator[LabRankValues]:
    first = min(start for _, _, (start, _) in measurements)
    for rank, (before, after, (start, end)) in zip(ranks, measurements, strict=True):
        if primitive == "barrier":
            before, after = [1e6 * (start - first)], [1e6 * (end - first)]
        yield LabRankValues(
            rank=rank,
            before=None if before is None else tuple(before),
            after=None if after is None else tuple(after),
        )
