"""Server-sent events of a job: their format, the items that become events, and the ids from which clients resume."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from contracts.telemetry.steps import LogItem, StepItem

RETRY = b"retry: 3000\n\n"  # milliseconds until a disconnected client connects again
HEARTBEAT = b": still here\n\n"
OUTAGE = b": telemetry cannot be read just now\n\n"
ID_PATTERN = r"^([0-9]{1,18})\.([0-9]{1,9})\.([0-9]{1,15})\.([0-9:,-]*)$"
EVENT_KINDS, LIVE_KINDS = ("log", "step"), ("step", "traffic")
_STEP_FIELDS = ("rank", "time", "step", "steps", "step_s", "tokens", "loss", "grad_norm", "learning_rate", "not_finite")
_LOG_FIELDS = ("rank", "time", "first", "lines")
_ID = re.compile(ID_PATTERN)
_ENTRY_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_MAX_ENTRY_NUMBER = 2**64 - 1  # in each half of an entry id: Redis refuses more


class Position(NamedTuple):
    """Hold what a client has received.

    Args:
        change: The last change of status, 0 for none.
        attempt: The attempt to which `step` and `streams` belong.
        step: The last step.
        streams: The last entry of each node's stream.
    """

    change: int = 0
    attempt: int = 0
    step: int = 0
    streams: tuple[tuple[int, str], ...] = ()


class LogSelector(NamedTuple):
    """Select one log of an attempt by its node and its rank there, -1 for the launcher."""

    attempt: int
    node: int
    rank: int


def format_event(name: str, data: Any, position: Position | None = None) -> bytes:
    """Format one event. A client that received it resumes from `position`."""
    head = "" if position is None else f"id: {format_position(position)}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def format_position(position: Position) -> str:
    streams = ",".join(f"{node}:{entry}" for node, entry in position.streams)
    return f"{position.change}.{position.attempt}.{position.step}.{streams}"


def parse_position(text: str) -> Position | None:
    """Parse an event id. Return None if it is invalid."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    change, attempt, step = (int(number) for number in match.groups()[:3])
    streams = parse_stream_positions(match[4]) if match[4] else {}
    return None if streams is None else Position(change, attempt, step, tuple(sorted(streams.items())))


def parse_stream_positions(text: str) -> dict[int, str] | None:
    """Parse the last entry id by node: "7-0" for node 0, or "0:7-0,2:9-1". Return None if it is invalid."""
    if _is_entry_id(text):
        return {0: text}
    positions: dict[int, str] = {}
    for part in text.split(","):
        node, _, entry = part.partition(":")
        if not (node.isascii() and node.isdigit() and len(node) < 6 and _is_entry_id(entry)):
            return None
        positions[int(node)] = entry
    return positions


def _is_entry_id(text: str) -> bool:
    match = _ENTRY_ID.fullmatch(text)
    return match is not None and all(int(half) <= _MAX_ENTRY_NUMBER for half in match.groups())


def serialize_steps(items: list[StepItem], after: int) -> list[dict[str, Any]]:
    """Return one item for each step after `after`, in order.

    Prefer an item of a rank that knows the loss, or that the loss is not finite.
    """
    best: dict[int, StepItem] = {}
    for item in items:
        other = best.get(item["step"])
        if item["step"] > after and (other is None or (_knows_loss(item) and not _knows_loss(other))):
            best[item["step"]] = item
    rows: list[dict[str, Any]] = [{**best[step]} for step in sorted(best)]
    return [{name: row[name] for name in _STEP_FIELDS if name in row} for row in rows]


def _knows_loss(item: StepItem) -> bool:
    return item["loss"] is not None or "not_finite" in item


def serialize_log(item: LogItem, node: int) -> dict[str, Any]:
    fields = {name: item[name] for name in _LOG_FIELDS}  # type: ignore[literal-required]
    return {"node": node, **fields, "skipped": item.get("skipped", 0)}
