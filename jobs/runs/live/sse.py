"""Server-sent events: how they are written, what of a batch is one, and the ids that a reader goes on from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from contracts.telemetry.steps import LogItem, StepItem
from jobs.runs.live.consumers import positions
from jobs.runs.live.held import OneLog, Position

RETRY = b"retry: 3000\n\n"  # milliseconds until a reader whose line broke comes again
BEAT = b": still here\n\n"
AWAY = b": telemetry cannot be read just now\n\n"
ID_PATTERN = r"^([0-9]{1,18})\.([0-9]{1,9})\.([0-9]{1,15})\.([0-9:,-]*)$"
_ID = re.compile(ID_PATTERN)
EVENTS, LIVE = ("log", "step"), ("step", "traffic")
_OF_STEP = ("rank", "time", "step", "steps", "step_s", "tokens", "loss", "grad_norm", "learning_rate", "not_finite")


def event(name: str, data: Any, position: Position | None = None) -> bytes:
    """One event; `position`: where to go on behind it."""
    head = "" if position is None else f"id: {written(position)}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def written(position: Position) -> str:
    streams = ",".join(f"{node}:{entry}" for node, entry in position.streams)
    return f"{position.change}.{position.attempt}.{position.step}.{streams}"


def read(text: str) -> Position | None:
    """A position as `written`; None for what is none."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    change, attempt, step = (int(number) for number in found.groups()[:3])
    streams = positions(found[4]) if found[4] else {}
    return None if streams is None else Position(change, attempt, step, tuple(sorted(streams.items())))


def of_steps(found: list[StepItem], after: int) -> list[dict[str, Any]]:
    """One of each step that comes after `after`, in order: of a rank that knows the loss, or that it is no number,
    where one does."""
    best: dict[int, StepItem] = {}
    for item in found:
        kept = best.get(item["step"])
        if item["step"] > after and (kept is None or (_knows_loss(item) and not _knows_loss(kept))):
            best[item["step"]] = item
    told: list[Mapping[str, Any]] = [best[step] for step in sorted(best)]
    return [{name: item[name] for name in _OF_STEP if name in item} for item in told]


def _knows_loss(item: StepItem) -> bool:
    return item["loss"] is not None or "not_finite" in item


def of_log(item: LogItem, node: int) -> dict[str, Any]:
    names = ("rank", "time", "first", "lines")
    told = {name: item[name] for name in names}  # type: ignore[literal-required]
    return {"node": node, **told, "skipped": item.get("skipped", 0)}


def is_of(item: LogItem, node: int, log: OneLog | None) -> bool:
    """Whether a follower of `log`, or of everything, is told of it."""
    return log is None or (node, item["rank"]) == (log.node, log.rank)
