"""What a host has installed beside what the board has."""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, NamedTuple

NAMES = {
    "meshboard": "Meshboard",
    "python": "Python",
    "torch": "torch",
    "nccl": "NCCL",
    "driver": "NVIDIA driver",
    "cuda": "CUDA of the driver",
}


class VersionTold(NamedTuple):
    """`expected` is empty where the board has no opinion; `differs` in what matters between them."""

    name: str
    told: str
    expected: str
    differs: bool


def versions_of(facts: dict[str, Any] | None) -> list[VersionTold]:
    """In the order of NAMES, those that the host told."""
    told = (facts or {}).get("versions", {})
    expected = ours()
    return [
        VersionTold(words, told[key], expected.get(key, ""), differs(key, told[key], expected.get(key, "")))
        for key, words in NAMES.items()
        if told.get(key)
    ]


def differs(key: str, told: str, expected: str) -> bool:
    """Python up to its minor version; of the others what follows a plus, as CUDA's, says nothing."""
    if not expected:
        return False
    if key == "python":
        return told.split(".")[:2] != expected.split(".")[:2]
    return told.partition("+")[0] != expected.partition("+")[0]


@cache
def ours() -> dict[str, str]:
    """The board's own, and the torch that workers are to have."""
    told = {"python": platform.python_version()}
    try:
        told["meshboard"] = version("meshboard")
        pins = [found[1] for line in requires("meshboard") or [] if (found := re.match(r"torch==([\w.]+)", line))]
    except PackageNotFoundError:  # run from its sources
        return told
    return told | ({"torch": pins[0]} if pins else {})
