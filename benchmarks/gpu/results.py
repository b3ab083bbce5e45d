"""What a part left behind, in files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from benchmarks.gpu.machine import Fingerprint

State = Literal["passed", "failed", "cut", "skipped"]
SPENT = "out of time; run the command again to continue"


class Found(TypedDict):
    """What a part's own process says. `beside` holds what a measured figure of the same name is compared with.

    `untried` names the pieces of it that there was no time for.
    """

    measured: dict[str, float]
    beside: dict[str, float]
    wrong: list[str]
    notes: list[str]
    untried: NotRequired[list[str]]


class Result(TypedDict):
    """Of one part. `why` is empty where it passed; `day` is when it ended, by UTC; one was `cut` after `limit_s`."""

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
    limit_s: NotRequired[float]
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
    """Of a part that was run on this very machine and commit before."""
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    result = cast(Result, json.loads(path.read_text()))
    if result["machine"] != machine or result["state"] == "skipped":
        return None
    return Result(**{**result, "kept": True})


def pieces_file(folder: Path, part: str, machine: Fingerprint, *, fresh: bool) -> Path:
    """Where a part of many pieces keeps what it tells of each: lines of JSON, first whose they are.

    What another machine or commit told is not kept, and nothing where all is to be `fresh`.
    """
    path = folder / f"{part}.pieces"
    if not fresh and path.exists() and path.read_text().partition("\n")[0] == json.dumps(machine):
        return path
    path.write_text(f"{json.dumps(machine)}\n")
    return path
