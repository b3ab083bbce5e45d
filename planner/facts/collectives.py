"""Compute bytes and bandwidths of collectives, and define the collective benchmark.

Bytes and bandwidths have the conventions of nccl-tests (doc/PERFORMANCE.md).
`payload_bytes` is the full (gathered) buffer for all_gather, reduce_scatter, gather and scatter.
The benchmark is the job kind `lab`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contracts.telemetry.items import Op
from planner.facts.resources import Device
from planner.facts.spec import LAB_PRIMITIVES, JobSpec, LabDtype, LabPrimitive, LabSpec
from planner.facts.validation import Problem, StrictModel, format_count


def get_bus_factor(op: Op, group_size: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth.

    The ratio is also the bytes that a rank sends in a ring, divided by the payload bytes.
    """
    if group_size <= 1 or op == "barrier":
        return 0.0
    if op == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (group_size - 1) / group_size
    return 0.0 if op == "recv" else 1.0


def compute_algorithmic_bytes(op: Op, payload_bytes: int, group_size: int) -> int:
    """Return the bytes that this rank sends with a bandwidth-optimal algorithm, rounded.

    A recv sends no bytes.
    """
    return round(get_bus_factor(op, group_size) * payload_bytes)


LAB_VERSION: Literal[1] = 1
MAX_SIZES = 32  # Limit from the bounds of the spec's sizes.
MAX_STEP_RANKS = 16  # Larger groups are measured, but have no step-by-step values.
MAX_STEP_VALUES = 64
ITEM_BYTES: dict[LabDtype, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
# Integers up to these limits are exact, so the result of a sum does not depend on the order.
LARGEST_EXACT: dict[LabDtype, int] = {
    "float32": 2**24,
    "float64": 2**53,
    "float16": 2**11,
    "bfloat16": 2**8,
    "int32": 2**31 - 1,
    "int64": 2**53,
}

# Full buffers that a rank holds at the same time: input, copy of the input, output, and expected output. Shards of a
# buffer are not counted. Only the root of gather and scatter holds full buffers.
FULL_BUFFERS: dict[LabPrimitive, int] = {
    "broadcast": 3,
    "scatter": 2,
    "gather": 2,
    "all_gather": 2,
    "reduce": 2,
    "all_reduce": 3,
    "reduce_scatter": 2,
    "all_to_all": 4,
    "send_recv": 4,
    "isend_irecv": 4,
    "barrier": 0,
}

Count = Annotated[int, Field(ge=0)]
Values = Annotated[tuple[float, ...], Field(max_length=MAX_STEP_VALUES)]


def get_metered_op(primitive: LabPrimitive) -> Op:
    """Return the op that counts a primitive's bytes. A message counts at its sender."""
    return "send" if primitive in ("send_recv", "isend_irecv") else primitive  # type: ignore[return-value]


def get_lab_spec(spec: JobSpec) -> LabSpec:
    """Return the benchmark settings of a job, or the defaults."""
    return spec.lab or LabSpec()


def get_lab_ranks(spec: JobSpec) -> tuple[int, ...]:
    """Return the job's ranks that form the benchmarked group, in group order."""
    lab = get_lab_spec(spec)
    return tuple(range(spec.layout.world_size)) if lab.ranks is None else tuple(lab.ranks)


def compute_lab_sizes(lab: LabSpec, group_size: int) -> list[int]:
    """Return the sizes of the full buffers in bytes, in whole elements per rank."""
    share = group_size * ITEM_BYTES[lab.dtype]
    sizes, size = [], lab.min_bytes
    while size <= lab.max_bytes:
        sizes.append(size // share * share)
        size *= lab.factor
    return list(dict.fromkeys(sizes))


def count_full_buffers(primitive: LabPrimitive, group_size: int) -> int:
    """Return the number of ranks that hold full buffers."""
    return 1 if primitive in ("gather", "scatter") else group_size


def compute_bandwidths(primitive: LabPrimitive, num_bytes: int, seconds: float, group_size: int) -> tuple[float, float]:
    """Return (algbw, busbw) in bytes per second, as nccl-tests defines them.

    algbw = S / t, where S is the size of the full buffer, and busbw = algbw x factor (doc/PERFORMANCE.md).
    The factor is 2(n-1)/n for all-reduce.
    It is (n-1)/n for all-gather, reduce-scatter, all-to-all, gather, and scatter.
    It is 1 for broadcast, reduce, and send/recv. A barrier moves no bytes.
    """
    algbw = num_bytes / seconds
    return algbw, algbw * get_bus_factor(get_metered_op(primitive), group_size)


class LabPoint(StrictModel):
    """Result of one primitive at one size.

    `seconds` is the median over iterations of the slowest rank's time.
    `wrong` counts the elements that differ from the result without communication.
    `checked` counts all compared elements. Both are sums over ranks and timed calls.
    `payload_bytes` and `algorithmic_bytes` are the metered bytes of one call on one rank.
    """

    primitive: LabPrimitive
    num_bytes: Count
    seconds: Annotated[float, Field(gt=0)]
    algbw: float | None = Field(description="algorithm bandwidth (bytes per second); null for a barrier")
    busbw: float | None
    checked: Count
    wrong: Count
    payload_bytes: Count
    algorithmic_bytes: Count


class LabRankValues(StrictModel):
    """Elements of a rank before and after a call, or null if it had no buffer.

    For a barrier, the values are its arrival and departure in microseconds after the first arrival.
    """

    rank: Count
    before: Values | None
    after: Values | None


class LabStep(StrictModel):
    """Values of one primitive on tiny tensors, for every rank of the group."""

    primitive: LabPrimitive
    holdings: tuple[LabRankValues, ...] = Field(min_length=2, max_length=MAX_STEP_RANKS)


class LabResult(StrictModel):
    """All results of one benchmark run."""

    version: Literal[1] = LAB_VERSION
    device: Device
    device_name: str = Field(max_length=200)
    backend: str = Field(max_length=32)
    torch_version: str = Field(max_length=64)
    world_size: Annotated[int, Field(ge=2)]
    ranks: tuple[Count, ...] = Field(min_length=2, max_length=1024)
    root: Count
    dtype: LabDtype
    reduce_op: Literal["sum", "max"]
    iterations: Annotated[int, Field(ge=1)]
    points: tuple[LabPoint, ...] = Field(min_length=1, max_length=MAX_SIZES * len(LAB_PRIMITIVES))
    steps: tuple[LabStep, ...] = Field(max_length=len(LAB_PRIMITIVES))

    @property
    def wrong(self) -> int:
        """Return the number of wrong elements in all points."""
        return sum(point.wrong for point in self.points)


def find_lab_problems(spec: JobSpec) -> list[Problem]:
    """Return the problems of the benchmark settings of a spec."""
    lab = get_lab_spec(spec)
    found = []
    if repeated := _format_repeated(lab.primitives):
        found.append(Problem("lab.primitives", f"`lab.primitives` repeats {repeated}. Use each once."))
    return [*found, *_find_group_problems(spec, lab), *_find_size_problems(lab, len(get_lab_ranks(spec)))]


def _find_group_problems(spec: JobSpec, lab: LabSpec) -> list[Problem]:
    ranks, world = get_lab_ranks(spec), spec.layout.world_size
    where = "layout.dp" if lab.ranks is None else "lab.ranks"
    found = []
    if len(ranks) < 2:
        found.append(
            Problem(where, f"`{where}` gives a group of {format_count(len(ranks), 'rank')}. Use 2 or more ranks.")
        )
    if repeated := _format_repeated(ranks):
        found.append(Problem("lab.ranks", f"`lab.ranks` repeats {repeated}. Use each rank once."))
    if beyond := [rank for rank in ranks if rank >= world]:
        missing = ", ".join(map(str, dict.fromkeys(beyond)))
        text = f"`lab.ranks` contains {missing}, but dp is {world}. Use ranks from 0 to {world - 1}."
        found.append(Problem("lab.ranks", text))
    if lab.root is not None and lab.root not in ranks:
        found.append(
            Problem(
                "lab.root", f"`lab.root` is {lab.root}, which is not in the group. Use one of {_format_ranks(ranks)}."
            )
        )
    exact = LARGEST_EXACT[lab.dtype]
    if len(ranks) > exact:
        text = f"`lab.dtype` is {lab.dtype}, whose sums are exact only up to {exact} ranks. Use float32 or int32."
        found.append(Problem("lab.dtype", text))
    return found


def _find_size_problems(lab: LabSpec, group_size: int) -> list[Problem]:
    if lab.min_bytes > lab.max_bytes:
        text = f"`lab.max_bytes` is {lab.max_bytes}. Use at least min_bytes {lab.min_bytes}."
        return [Problem("lab.max_bytes", text)]
    item = ITEM_BYTES[lab.dtype]
    if lab.min_bytes < group_size * item:
        least = f"{group_size * item}, one {lab.dtype} element for each of {group_size} ranks"
        return [Problem("lab.min_bytes", f"`lab.min_bytes` is {lab.min_bytes}. Use at least {least}.")]
    return []


def _format_repeated(values: list[LabPrimitive] | tuple[int, ...]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if values.count(value) > 1))  # type: ignore[arg-type]


def _format_ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"
