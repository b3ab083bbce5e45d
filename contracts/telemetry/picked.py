"""Items of a few kinds out of a batch as Redis has it, for who shows or counts what is told just now.

A host may write to its streams what it likes, and of another version it may write otherwise: what makes no sense is
left out, so that it spoils nothing of what others tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from contracts.telemetry.steps import LogItem, PhaseItem, StepItem, TrafficItem

Picked = LogItem | PhaseItem | StepItem | TrafficItem
_OF_KIND: dict[str, TypeAdapter[Any]] = {
    "log": TypeAdapter(LogItem),
    "phase": TypeAdapter(PhaseItem),
    "step": TypeAdapter(StepItem),
    "traffic": TypeAdapter(TrafficItem),
}


def picked(batch: bytes, kinds: Iterable[str]) -> Iterator[Any]:
    """A `Picked` each."""
    try:
        told = msgpack.unpackb(batch)
        found = told["items"] if isinstance(told, dict) else []
    except (ValueError, KeyError, msgpack.UnpackException):
        return
    for item in found if isinstance(found, list) else []:
        kind: Any = item.get("kind") if isinstance(item, dict) else None
        if kind not in kinds:
            continue
        try:
            yield _OF_KIND[kind].validate_python(item)
        except ValidationError:
            continue


def picked_of(entries: Iterable[tuple[Any, Mapping[bytes, bytes]]], kinds: Iterable[str]) -> Iterator[Any]:
    """Of entries of a stream, in their order."""
    for _, fields in entries:
        yield from picked(fields.get(b"b", b""), kinds)
