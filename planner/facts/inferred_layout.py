"""Infer the parallel layout of a user's script from the process groups that its ranks use during steps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

InferredAxis = Literal["dp", "dp_replicas", "pp", "tp", "cp", "ep"]

DATA_WITH_CONTEXT = ("data_with_cp", "dp_cp", "cp_dp", "dp_shard_cp")  # groups that span dp and cp
# Names of mesh dimensions and groups in torchtitan, Megatron-LM, DeepSpeed, nanotron, picotron, and accelerate.
AXIS_NAMES: dict[str, InferredAxis] = {
    **dict.fromkeys(("dp", "ddp", "data", "fsdp", "dp_shard", "shard", *DATA_WITH_CONTEXT[1:], "batch", "zero"), "dp"),
    **dict.fromkeys(("dp_replicate", "replicate", "replica", "replicas", "hsdp"), "dp_replicas"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage", "stages"), "pp"),
    **dict.fromkeys(("tp", "tensor", "model", "mp"), "tp"),
    **dict.fromkeys(("cp", "context", "sp", "seq", "sequence", "ulysses"), "cp"),
    **dict.fromkeys(("ep", "expert", "experts"), "ep"),
}
GRADIENT_BYTES = (2, 4)  # per parameter
MAX_GRADIENT_DIFFERENCE = 0.1  # relative, because a script's model may have more parameters than its plan
REGATHERED = 1.5  # all-gathers per reduce-scatter above which backward gathers parameters again


class GroupTraffic(NamedTuple):
    """Traffic of one rank over groups with the same label, size, and operation, per step.

    Args:
        label: Mesh dimension or description of the group, "world", or its ranks.
        size: Number of ranks in the group.
        op: Name of the collective, as in `contracts.telemetry.items.Op`.
        calls: Calls per step.
        payload_bytes: Bytes per step.
    """

    label: str
    size: int
    op: str
    calls: float
    payload_bytes: float


class InferredLayout(NamedTuple):
    """Layout of a script.

    Args:
        fields: Fields of a `Layout` that differ from their defaults.
        axes: Axis of each group, by label and size.
        assumptions: A sentence for each assumption that the traffic does not prove.
    """

    fields: dict[str, Any]
    axes: dict[tuple[str, int], str]
    assumptions: tuple[str, ...]


class CannotInferError(ValueError):
    """The groups do not explain all ranks. The message names the ranks and the way out."""


def infer_layout(world_size: int, traffic: Iterable[GroupTraffic], num_parameters: int | None = None) -> InferredLayout:
    """Return the layout whose groups carry the traffic of the steps.

    Args:
        num_parameters: Parameters of the model. If known, an all-reduce of an unnamed group counts as dp only if it
            carries the gradients, because tensor parallelism also all-reduces.

    Raises:
        CannotInferError: The degrees of the groups do not multiply to `world_size`.
    """
    used = [row for row in traffic if row.size > 1 and row.calls > 0]
    groups: dict[tuple[str, int], list[GroupTraffic]] = defaultdict(list)
    for row in used:
        groups[row.label, row.size].append(row)
    degrees: dict[InferredAxis, int] = {}
    rows_by_axis: dict[InferredAxis, list[GroupTraffic]] = defaultdict(list)
    unnamed: list[list[GroupTraffic]] = []
    has_tensor_group = any(get_named_axis(row.label) == "tp" and not _is_model_group(row.label) for row in used)
    for (label, size), rows in sorted(groups.items()):
        if has_tensor_group and _is_model_group(label):
            continue  # Megatron's group of tp x pp ranks
        axis = get_named_axis(label)
        if axis is None:
            unnamed.append(rows)
            continue
        rows_by_axis[axis] += rows
        if not _spans_context(label):
            degrees[axis] = max(size, degrees.get(axis, 1))
    for label, size in groups:
        if _spans_context(label):
            degrees["dp"] = max(size // degrees.get("cp", 1), degrees.get("dp", 1))
    assumptions, doubts = _add_unnamed_groups(world_size, degrees, rows_by_axis, unnamed, num_parameters)
    explained = _multiply(degrees)
    if explained != world_size:
        found = " x ".join(f"{axis} {degree}" for axis, degree in sorted(degrees.items())) or "no group"
        sentences = [f"The groups of the script explain {explained} of {world_size} ranks ({found}).", *doubts]
        raise CannotInferError(f"{' '.join(sentences)} Set `script.plan.layout`.")
    fields = _make_fields(degrees, rows_by_axis)
    if fields.get("zero") == 2:
        assumptions.append("ZeRO-2 is assumed. ZeRO-1 and ZeRO-2 send the same bytes.")
    if fields.get("pp", 1) > 1:
        assumptions.append("The schedule is assumed to be 1F1B.")
    axes: dict[tuple[str, int], str] = {
        (row.label, row.size): "dp" if axis == "dp_replicas" else axis
        for axis, rows in rows_by_axis.items()
        for row in rows
    }
    return InferredLayout(fields, axes, tuple(assumptions))


def get_named_axis(label: str) -> InferredAxis | None:
    """Return the axis that a label names, or None."""
    return AXIS_NAMES.get(_normalize(label).removesuffix("_with_cp"))


def _normalize(label: str) -> str:
    """Return the name of an axis in a label: `data_with_cp` of `DATA_PARALLEL_GROUP_WITH_CP`."""
    return re.sub(r"(_model)?_parallel|_group", "", label.lower().replace("-", "_"))


def _is_model_group(label: str) -> bool:
    return _normalize(label) in ("model", "mp")


def _spans_context(label: str) -> bool:
    return _normalize(label) in DATA_WITH_CONTEXT


def _multiply(degrees: dict[InferredAxis, int]) -> int:
    return math.prod(degree for axis, degree in degrees.items() if axis != "ep")


def _add_unnamed_groups(
    world_size: int,
    degrees: dict[InferredAxis, int],
    rows_by_axis: dict[InferredAxis, list[GroupTraffic]],
    unnamed: list[list[GroupTraffic]],
    num_parameters: int | None,
) -> tuple[list[str], list[str]]:
    """Give each unnamed group the axis of its operations, the group with most bytes first.

    Groups of sends come last, because stages may send over the default group. Return the assumptions, and a sentence
    for each group whose all-reduce does not carry the gradients.
    """
    assumptions, doubts = [], []
    has_unnamed_stages = any(_guess_axis(rows) == "pp" for rows in unnamed)
    for rows in sorted(unnamed, key=lambda rows: (_guess_axis(rows) == "pp", -sum(row.payload_bytes for row in rows))):
        label, size = rows[0].label, rows[0].size
        missing = world_size // _multiply(degrees)
        axis = _guess_axis(rows)
        if axis == "ep":
            if "ep" in degrees:
                continue
            degrees["ep"] = size
        elif axis == "pp" and axis not in degrees and missing > 1 and size % missing == 0:
            degrees[axis] = missing
        elif missing % size == 0 and axis not in degrees:
            shards = degrees.get("tp", 1) * degrees.get("pp", missing // size if has_unnamed_stages else 1)
            if axis == "dp" and num_parameters and not _carries_gradients(rows, num_parameters / shards):
                doubts.append(f"The all_reduce of group {label!r} does not have the size of the model's gradients.")
                continue
            degrees[axis] = size
        else:
            continue
        rows_by_axis[axis] += rows
        operations = ", ".join(sorted({row.op for row in rows}))
        assumptions.append(f"Group {label!r} of {size} ranks is assumed to be {axis}, because of its {operations}.")
    return assumptions, doubts


def _guess_axis(rows: list[GroupTraffic]) -> InferredAxis:
    largest = _find_largest(rows)
    if largest.op in ("send", "recv"):
        return "pp"
    return "ep" if largest.op == "all_to_all" else "dp"


def _carries_gradients(rows: list[GroupTraffic], num_parameters: float) -> bool:
    """Return False if an all-reduce does not have the size of the gradients of a rank."""
    if _find_largest(rows).op != "all_reduce":
        return True
    per_parameter = sum(row.payload_bytes for row in rows if row.op == "all_reduce") / num_parameters
    return any(abs(per_parameter / size - 1) <= MAX_GRADIENT_DIFFERENCE for size in GRADIENT_BYTES)


def _find_largest(rows: list[GroupTraffic]) -> GroupTraffic:
    return max(rows, key=lambda row: row.payload_bytes)


def _make_fields(degrees: dict[InferredAxis, int], rows: dict[InferredAxis, list[GroupTraffic]]) -> dict[str, Any]:
    fields: dict[str, Any] = {axis: degree for axis, degree in degrees.items() if axis != "dp_replicas" and degree > 1}
    replicas = degrees.get("dp_replicas", 1)
    if replicas > 1:
        fields["dp"] = degrees.get("dp", 1) * replicas
        if degrees.get("dp", 1) > 1:
            fields["dp_replicas"] = replicas
    gathers, scatters = _count_calls(rows["dp"], "all_gather"), _count_calls(rows["dp"], "reduce_scatter")
    if gathers and scatters:
        fields["zero"] = 3 if gathers > REGATHERED * scatters else 2
    if _count_calls(rows["tp"], "reduce_scatter") and fields.get("tp", 1) > 1:
        fields["sequence_parallel"] = True
    if _count_calls(rows["cp"], "all_gather") and fields.get("cp", 1) > 1:
        fields["cp_method"] = "all_gather"
    return fields


def _count_calls(rows: list[GroupTraffic], op: str) -> float:
    """Return the calls per step of collectives that carry more than a loss or a norm."""
    most = max((row.payload_bytes for row in rows), default=0.0)
    return sum(row.calls for row in rows if row.op == op and row.payload_bytes > 0.01 * most)
