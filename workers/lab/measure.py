"""Each primitive at each size: timed, checked, counted; and once on tensors small enough to show."""

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
from workers.lab.primitives import PrimitiveCall, build_call
from workers.lab.values import RankContext, build_expected, count_mismatches, fill_readable
from workers.meter import Recorder

STEP_ELEMENTS = 4


class LabGroup(NamedTuple):
    """The group at work, and a gloo group of the same ranks that agrees beside it and is not metered."""

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    recorder: Recorder


class RankMeasurement(NamedTuple):
    """What one rank found at one size."""

    spans: list[tuple[float, float]]
    checked: int
    wrong: int
    payload_bytes: int
    algorithmic_bytes: int


def measure_points(
    team: LabGroup, setting: RankContext, lab: LabSpec, say: Callable[[str], None]
) -> Iterator[LabPoint]:
    """Every point; on the first rank of the group alone."""
    item = torch.empty(0, dtype=setting.dtype).element_size()
    for place, primitive in enumerate(lab.primitives, start=1):
        say(f"{place}/{len(lab.primitives)}: {primitive} over {setting.size} ranks")
        for num_bytes in [0] if primitive == "barrier" else compute_lab_sizes(lab, setting.size):
            told = _shared(team, _measured(team, setting, lab, primitive, num_bytes // item))
            if setting.me == 0:
                yield _point(primitive, num_bytes, told)


def _measured(
    team: LabGroup, setting: RankContext, lab: LabSpec, primitive: LabPrimitive, full: int
) -> RankMeasurement:
    call = build_call(primitive, team.group, setting, full)
    wanted = build_expected(primitive, setting, full)
    for _ in range(lab.warmup):
        _once(call, team, setting.device)
    payload, algorithmic = _counted(team, primitive)
    spans, wrong = [], 0
    for _ in range(lab.iterations):
        spans.append(_once(call, team, setting.device))
        wrong += count_mismatches(call.held, wanted)
    payload_after, algorithmic_after = _counted(team, primitive)
    return RankMeasurement(
        spans=spans,
        checked=0 if wanted is None else wanted.numel() * lab.iterations,
        wrong=wrong,
        payload_bytes=(payload_after - payload) // lab.iterations,
        algorithmic_bytes=round((algorithmic_after - algorithmic) / lab.iterations),
    )


def _once(call: PrimitiveCall, team: LabGroup, device: torch.device) -> tuple[float, float]:
    """Start and end of a call on fresh buffers, by the machine's monotonic clock, which its ranks share."""
    call.reset()
    _wait(device)
    dist.barrier(team.control)
    started = time.perf_counter()
    call.run()
    _wait(device)
    return started, time.perf_counter()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _counted(team: LabGroup, primitive: LabPrimitive) -> tuple[int, int]:
    """Payload and algorithmic bytes this rank's meter has seen of a primitive in the group so far."""
    op = get_metered_op(primitive)
    cells = [c for c in team.recorder.get_cells("step") if c["op"] == op]
    return sum(c["payload_bytes"] for c in cells), sum(c["algorithmic_bytes"] for c in cells)


def _shared(team: LabGroup, mine: Any) -> list[Any]:
    """What every rank of the group says, in its order."""
    told: list[Any] = [None] * team.control.size()
    dist.all_gather_object(told, mine, group=team.control)
    return told


def _point(primitive: LabPrimitive, num_bytes: int, told: list[RankMeasurement]) -> LabPoint:
    iterations = list(zip(*(rank.spans for rank in told), strict=True))
    seconds = statistics.median(max(end - start for start, end in spans) for spans in iterations)
    algbw, busbw = compute_bandwidths(primitive, num_bytes, seconds, len(told)) if num_bytes else (None, None)
    checked, wrong = sum(rank.checked for rank in told), sum(rank.wrong for rank in told)
    if primitive == "barrier":  # nobody may leave before the last one came
        checked = len(iterations) * len(told)
        wrong = sum(end < max(start for start, _ in spans) for spans in iterations for _, end in spans)
    return LabPoint(
        primitive=primitive,
        num_bytes=num_bytes,
        seconds=seconds,
        algbw=algbw,
        busbw=busbw,
        checked=checked,
        wrong=wrong,
        payload_bytes=max(rank.payload_bytes for rank in told),
        algorithmic_bytes=max(rank.algorithmic_bytes for rank in told),
    )


def record_steps(team: LabGroup, setting: RankContext, primitives: list[LabPrimitive]) -> Iterator[LabStep]:
    """What every rank held before and after each primitive; on the first rank of the group alone."""
    if setting.size > MAX_STEP_RANKS:
        return
    small = setting._replace(dtype=torch.float32, fill=fill_readable)
    full = -(-STEP_ELEMENTS // setting.size) * setting.size
    for primitive in primitives:
        call = build_call(primitive, team.group, small, full)
        before = None if call.give is None else call.give.tolist()
        span = _once(call, team, setting.device)
        after = None if call.held is None else call.held.tolist()
        told = _shared(team, (before, after, span))
        if setting.me == 0:
            yield LabStep(primitive=primitive, holdings=tuple(_holdings(primitive, setting.ranks, told)))


def _holdings(primitive: LabPrimitive, ranks: tuple[int, ...], told: list[Any]) -> Iterator[LabRankValues]:
    first = min(start for _, _, (start, _) in told)
    for rank, (before, after, (start, end)) in zip(ranks, told, strict=True):
        if primitive == "barrier":
            before, after = [1e6 * (start - first)], [1e6 * (end - first)]
        yield LabRankValues(
            rank=rank,
            before=None if before is None else tuple(before),
            after=None if after is None else tuple(after),
        )
