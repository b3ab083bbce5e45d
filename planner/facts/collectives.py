"""Bytes of each collective, in the conventions of nccl-tests (doc/PERFORMANCE.md).

`payload_bytes` is the FULL (gathered) buffer for all_gather, reduce_scatter, gather and scatter.

The collective lab: which sizes it runs, what bandwidth a time means, what a run reports, and rules of its spec.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contracts.telemetry.vocabulary import Op
from planner.facts.resources import Device
from planner.facts.spec import LAB_PRIMITIVES, JobSpec, LabDtype, LabPrimitive, LabSpec
from planner.facts.validation import Problem, Strict, counted


def bus_factor(op: Op, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth; also ring-optimal bytes sent per rank over payload bytes."""
    if group_size <= 1 or op == "barrier":
        return 0.0
    if op == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (group_size - 1) / group_size
    return 0.0 if op == "recv" else 1.0


def algorithmic_bytes(op: Op, payload_bytes: int, group_size: int) -> int:
    """What a bandwidth-optimal algorithm makes this rank send, rounded to the nearest byte. A recv sends nothing."""
    return round(bus_factor(op, group_size) * payload_bytes)


LAB_VERSION: Literal[1] = 1
MAX_SIZES = 32  # as many as the spec's own bounds allow
MAX_STEP_RANKS = 16  # larger groups are measured, but nobody could read their picture
MAX_STEP_VALUES = 64
ITEM_BYTES: dict[LabDtype, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
# Whole numbers up to these are exact, so that a sum has one right answer whatever its order.
LARGEST_EXACT: dict[LabDtype, int] = {
    "float32": 2**24,
    "float64": 2**53,
    "float16": 2**11,
    "bfloat16": 2**8,
    "int32": 2**31 - 1,
    "int64": 2**53,
}

# Full buffers that a rank holds at once: what it hands over and a copy of it, what it takes where that is another, and
# what it must hold afterwards. Shares of one are not counted; of gather and scatter the root alone holds any.
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


def metered_op(primitive: LabPrimitive) -> Op:
    """The op that the meter counts a primitive's bytes under. A message is counted where it is sent."""
    return "send" if primitive in ("send_recv", "isend_irecv") else primitive  # type: ignore[return-value]


def lab_of(spec: JobSpec) -> LabSpec:
    """What the job runs."""
    return spec.lab or LabSpec()


def lab_ranks(spec: JobSpec) -> tuple[int, ...]:
    """The job's ranks that form the group, in the order of the group."""
    lab = lab_of(spec)
    return tuple(range(spec.layout.world_size)) if lab.ranks is None else tuple(lab.ranks)


def lab_sizes(lab: LabSpec, group_size: int) -> list[int]:
    """Bytes of each full buffer: from min_bytes by the factor to max_bytes, in whole elements for every rank."""
    share = group_size * ITEM_BYTES[lab.dtype]
    sizes, asked = [], lab.min_bytes
    while asked <= lab.max_bytes:
        sizes.append(asked // share * share)
        asked *= lab.factor
    return list(dict.fromkeys(sizes))


def holders(primitive: LabPrimitive, group_size: int) -> int:
    """Ranks that hold full buffers."""
    return 1 if primitive in ("gather", "scatter") else group_size


def bandwidths(primitive: LabPrimitive, num_bytes: int, seconds: float, group_size: int) -> tuple[float, float]:
    """(algbw, busbw) in bytes a second.

    As nccl-tests has them (doc/PERFORMANCE.md): algbw = S / t with S the full buffer, and busbw = algbw x factor.
    The factor is 2(n-1)/n for all-reduce; (n-1)/n for all-gather, reduce-scatter, all-to-all, gather and scatter; 1
    for broadcast, reduce and send/recv. A barrier moves no bytes.
    """
    algbw = num_bytes / seconds
    return algbw, algbw * bus_factor(metered_op(primitive), group_size)


class LabPoint(Strict):
    """One primitive at one size.

    `seconds` is the median over iterations of the slowest rank's time. `wrong` elements of the `checked` ones differ
    from what was computed without communication, over all ranks and timed calls. Payload and algorithmic bytes are of
    one call on one rank, as its meter counted them.
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


class LabHolding(Strict):
    """What a rank held before and after: elements, none where it had no buffer.

    Of a barrier, when it came and when it left: microseconds since the first one came.
    """

    rank: Count
    before: Values | None
    after: Values | None


class LabStep(Strict):
    """One primitive on tiny tensors, as every rank of the group had them."""

    primitive: LabPrimitive
    holdings: tuple[LabHolding, ...] = Field(min_length=2, max_length=MAX_STEP_RANKS)


class LabResult(Strict):
    """Everything one run of the lab found."""

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
        """Elements that differ from what they should be, in all points."""
        return sum(point.wrong for point in self.points)


def lab_problems(spec: JobSpec) -> list[Problem]:
    """What of a lab's own part of the spec cannot run, each with its arithmetic."""
    lab = lab_of(spec)
    found = []
    if repeated := _repeated(lab.primitives):
        found.append(Problem("lab.primitives", f"`lab.primitives` repeats {repeated}. Use each once."))
    return [*found, *_group(spec, lab), *_sizes(lab, len(lab_ranks(spec)))]


def _group(spec: JobSpec, lab: LabSpec) -> list[Problem]:
    ranks, world = lab_ranks(spec), spec.layout.world_size
    where = "layout.dp" if lab.ranks is None else "lab.ranks"
    found = []
    if len(ranks) < 2:
        found.append(Problem(where, f"`{where}` gives a group of {counted(len(ranks), 'rank')}. Use 2 or more ranks."))
    if repeated := _repeated(ranks):
        found.append(Problem("lab.ranks", f"`lab.ranks` repeats {repeated}. Use each rank once."))
    if beyond := [rank for rank in ranks if rank >= world]:
        missing = ", ".join(map(str, dict.fromkeys(beyond)))
        text = f"`lab.ranks` contains {missing}, but dp is {world}. Use ranks from 0 to {world - 1}."
        found.append(Problem("lab.ranks", text))
    if lab.root is not None and lab.root not in ranks:
        found.append(
            Problem("lab.root", f"`lab.root` is {lab.root}, which is not in the group. Use one of {_words(ranks)}.")
        )
    exact = LARGEST_EXACT[lab.dtype]
    if len(ranks) > exact:
        text = f"`lab.dtype` is {lab.dtype}, whose sums are exact only up to {exact} ranks. Use float32 or int32."
        found.append(Problem("lab.dtype", text))
    return found


def _sizes(lab: LabSpec, group_size: int) -> list[Problem]:
    if lab.min_bytes > lab.max_bytes:
        text = f"`lab.max_bytes` is {lab.max_bytes}. Use at least min_bytes {lab.min_bytes}."
        return [Problem("lab.max_bytes", text)]
    item = ITEM_BYTES[lab.dtype]
    if lab.min_bytes < group_size * item:
        least = f"{group_size * item}, one {lab.dtype} element for each of {group_size} ranks"
        return [Problem("lab.min_bytes", f"`lab.min_bytes` is {lab.min_bytes}. Use at least {least}.")]
    return []


def _repeated(values: list[LabPrimitive] | tuple[int, ...]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if values.count(value) > 1))  # type: ignore[arg-type]


def _words(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"
