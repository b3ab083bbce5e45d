"""Read and write results of parts atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from benchmarks.gpu.machine import Fingerprint

State = Literal["passed", "failed", "cut", "skipped"]
OUT_OF_TIME = "out of time; run the command again to continue"


class PartOutput(TypedDict):
    """Output of a part's program. `beside` has expected values by name. `untried` has pieces that did not run."""

    measured: dict[str, float]
    beside: dict[str, float]
    wrong: list[str]
    notes: list[str]
    untried: NotRequired[list[str]]


class PartResult(TypedDict):
    """Result of a part. `why` is empty if it passed. `day` is the UTC date of its end. `limit_s` cut the part."""

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


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(path)


def read_output(path: Path) -> PartOutput | None:
    """Return the output of a part's program, or None."""
    return cast(PartOutput, json.loads(path.read_text())) if path.exists() else None


def read_earlier_result(folder: Path, part: str, machine: Fingerprint) -> PartResult | None:
    """Return the result of an earlier run of a part on this machine and commit."""
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    result = cast(PartResult, json.loads(path.read_text()))
    if result["machine"] != machine or result["state"] == "skipped":
        return None
    return PartResult(**{**result, "kept": True})


def open_pieces_file(folder: Path, part: str, machine: Fingerprint, *, fresh: bool) -> Path:
    """Return the file of results of a part with many pieces: JSON lines after a line with the fingerprint.

    It is empty if `fresh` is set, or if it has results of another machine or commit.
    """
    path = folder / f"{part}.pieces"
    if not fresh and path.exists() and path.read_text().partition("\n")[0] == json.dumps(machine):
        return path
    path.write_text(f"{json.dumps(machine)}\n")
    return path
