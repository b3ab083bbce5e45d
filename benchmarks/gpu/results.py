"""What a part left behind, in files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from benchmarks.gpu.machine import Fingerprint

State = Literal["passed", "failed", "skipped"]
SPENT = "the time for all parts was spent; the same command goes on here"


class Found(TypedDict):
    """What a part's own process says. `beside` holds what a measured figure of the same name is compared with."""

    measured: dict[str, float]
    beside: dict[str, float]
    wrong: list[str]
    notes: list[str]


class Result(TypedDict):
    """Of one part. `why` is empty where it passed; `day` is when it ended, by UTC."""

    part: str
    title: str
    state: State
    why: str
    day: str
    seconds: float
    machine: Fingerprint
    measured: dict[str, float]
    beside: dict[str, float]
    notes: list[str]
    kept: NotRequired[bool]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(path)


def found_in(path: Path) -> Found | None:
    """What a part's process wrote, if it did."""
    return cast(Found, json.loads(path.read_text())) if path.exists() else None


def earlier_result(folder: Path, part: str, machine: Fingerprint) -> Result | None:
    """Of a part that passed or failed on this very machine and commit before."""
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    result = cast(Result, json.loads(path.read_text()))
    if result["machine"] != machine or result["state"] == "skipped":
        return None
    return Result(**{**result, "kept": True})
