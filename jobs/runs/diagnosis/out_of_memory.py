"""Find the numbers in an out-of-memory error, and a batch size that fits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from jobs.runs.diagnosis.planned_run import PlannedRun
from planner.cost.estimate import get_rank_memory
from planner.facts.layout import get_coordinates
from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|\bMemoryError\b|can't allocate memory|Unable to allocate", re.IGNORECASE
)
UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
# Sentences of torch's allocators, checked on torch 2.13, and of numpy.
REQUESTED = re.compile(rf"(?:[Tt]ried to allocate|Unable to allocate) {SIZE}")
CAPACITY = re.compile(rf"total capacity of {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
IN_USE = re.compile(rf"this process has {SIZE} memory in use")
IN_TENSORS = re.compile(rf"allocated memory {SIZE} is allocated by PyTorch")
RESERVED = re.compile(rf"and {SIZE} is reserved by PyTorch but unallocated")
OTHERS = re.compile(rf"Process \d+ has {SIZE} memory in use")
MAX_MICRO_BATCHES = 4096


class OutOfMemory(NamedTuple):
    """Bytes in an out-of-memory error, None for those that the error does not name."""

    requested: int | None
    capacity: int | None
    free: int | None
    in_use: int | None  # by this rank, with memory outside PyTorch
    in_tensors: int | None
    reserved: int | None  # by PyTorch, without a tensor
    others: int | None  # in use by other processes


def parse_out_of_memory(texts: Iterable[str]) -> OutOfMemory | None:
    """Return the numbers of an out-of-memory error, None if no text is one. The text with most numbers counts."""
    errors = [_parse_error(text) for text in texts if OUT_OF_MEMORY.search(text)]
    return max(errors, key=lambda error: sum(number is not None for number in error), default=None)


def _parse_error(text: str) -> OutOfMemory:
    others = [_parse_size(*found) for found in OTHERS.findall(text)]
    return OutOfMemory(
        requested=_find(REQUESTED, text),
        capacity=_find(CAPACITY, text),
        free=_find(FREE, text),
        in_use=_find(IN_USE, text),
        in_tensors=_find(IN_TENSORS, text),
        reserved=_find(RESERVED, text),
        others=sum(others) if others else None,
    )


def cut_after_request(message: str) -> str:
    """Return an error message until the size of the failed allocation. The evidence holds the other numbers."""
    found = REQUESTED.search(message)
    return message if found is None else message[: found.end()]


def describe_request(error: OutOfMemory) -> str:
    """Return a sentence about the allocation that failed, empty if its size is unknown."""
    if error.requested is None:
        return ""
    sentence = f"The failed allocation needs {format_size(error.requested)}"
    if error.free is None:
        return f"{sentence}."
    capacity = f" of {format_size(error.capacity)}" if error.capacity is not None else ""
    return f"{sentence}, and {format_size(error.free)}{capacity} is free."


def list_memory_facts(error: OutOfMemory, run: PlannedRun, rank: int, resident_bytes: int | None) -> list[str]:
    """Return lines about the memory in use by part: measured, then planned.

    Args:
        resident_bytes: Memory of the rank's process on its host, as last measured. None if unknown.
    """
    parts: list[str] = []
    if error.in_tensors is not None:
        parts.append(f"tensors {format_size(error.in_tensors)}")
    if error.reserved is not None:
        parts.append(f"reserved by PyTorch without a tensor {format_size(error.reserved)}")
    if error.in_use is not None and error.in_tensors is not None and error.reserved is not None:
        outside = max(0, error.in_use - error.in_tensors - error.reserved)
        parts.append(f"outside PyTorch {format_size(outside)}")
    facts = []
    if error.in_use is not None:
        facts.append(f"memory in use by rank {rank}: {format_size(error.in_use)}")
    if parts:
        facts.append(f"by part: {', '.join(parts)}")
    if error.others is not None:
        facts.append(f"memory in use by other processes: {format_size(error.others)}")
    if error.capacity is None and resident_bytes is not None:
        facts.append(f"last measured memory of rank {rank} on its host: {format_size(resident_bytes)}")
    if planned := _get_planned_parts(run, rank):
        listed = ", ".join(f"{name} {format_size(size)}" for name, size in planned.items() if size)
        facts.append(f"planned memory of rank {rank}: {format_size(sum(planned.values()))} ({listed})")
    return facts


def suggest_micro_batches(error: OutOfMemory, run: PlannedRun, rank: int) -> str:
    """Return a next step with the fewest micro-batches that are planned to fit, empty without a plan."""
    planned, spec = _get_planned_parts(run, rank), run.spec
    if not planned or spec is None or error.capacity is None or error.in_use is None or error.requested is None:
        return ""
    planned_bytes = sum(planned.values())
    # The error shows how far the plan is below the memory that the rank needs.
    limit = planned_bytes * error.capacity / (error.in_use + error.requested)
    sequences = spec.train.global_batch // spec.layout.dp
    for micro_batches in range(spec.train.micro_batches + 1, min(sequences, MAX_MICRO_BATCHES) + 1):
        if sequences % micro_batches:
            continue
        size = sum(_get_planned_parts(run, rank, micro_batches).values())
        if size and size <= limit:
            return (
                f"Set `train.micro_batches` to {micro_batches}, which is planned to need {format_size(size)} per rank."
            )
    return ""


def format_size(num_bytes: float) -> str:
    """Return bytes with the unit that torch's errors use: "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            return f"{num_bytes / UNITS[unit]:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _get_planned_parts(run: PlannedRun, rank: int, micro_batches: int | None = None) -> dict[str, int]:
    """Return the planned memory of a rank by part, empty without a plan."""
    spec = run.spec
    if spec is None or run.cluster is None:
        return {}
    try:
        if micro_batches is not None:
            changed = spec.model_dump(mode="json")
            changed["train"]["micro_batches"] = micro_batches
            spec = parse_spec(changed)
        return get_rank_memory(spec, get_coordinates(rank, spec.layout).pp, run.cluster)
    except (SpecError, ValueError):
        return {}


def _find(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else _parse_size(found[1], found[2])


def _parse_size(number: str, unit: str) -> int:
    return int(float(number) * UNITS[unit])
