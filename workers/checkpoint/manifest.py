"""A checkpoint's files, as somebody else may have left them.

What a checkpoint says of itself. It may be another host's word, or what a disk made of it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import DEFAULT_ROPE_BASE, JobSpec
from planner.facts.validation import SpecError
from workers.trainer.errors import UserError

READ_BYTES = 2**20


def is_plain(name: str) -> bool:
    """Whether a file of that name lies in the folder that it is looked for in."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(name) <= 255


def regular(path: str, flags: int) -> int:
    """Opens what is a file: a link could lead anywhere, a FIFO would wait for ever. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def read_at_most(path: Path, most: int) -> bytes:
    """
    Raises:
        OSError: it cannot be opened.
        ValueError: it has more bytes.
    """
    with open(path, "rb", opener=regular) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"the file has more than {most:,} bytes")
    return data


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb", opener=regular) as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


MANIFEST = "manifest.json"
VERSION = 1
STEP = re.compile(r"step-(\d{8,})")
MOST_BYTES = 16 * 2**20
LARGEST = 2**63 - 1

Files = dict[str, tuple[int, int]]


class Manifest(NamedTuple):
    """How a checkpoint was made, every file's size and CRC-32, and a checksum of each tensor, of older ones none."""

    spec: JobSpec
    step: int
    files: Files
    rng: list[int]
    sums: dict[str, int]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check what a checkpoint says of itself.

    Raises:
        UserError: when it cannot be read or makes no sense; which checkpoint, the caller says.
    """
    try:
        content = json.loads(read_at_most(checkpoint / MANIFEST, MOST_BYTES))
        _must(type(content) is dict, "the JSON is not an object")
        _must(
            content["version"] == VERSION,
            f"the version is {str(content['version'])[:40]}, expected {VERSION}",
        )
        return Manifest(
            _spec(content["spec"]),
            _step(content["step"], checkpoint),
            _files(content["files"]),
            _rng(content["rng"]),
            _sums(content.get("sums", {})),
        )
    except KeyError as error:
        problem = f"{error} is missing"
    except RecursionError:
        problem = "the JSON is nested too deeply"
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, SpecError) as error:
        problem = str(error)
    raise UserError(f"cannot read {MANIFEST}: {problem}")


def _spec(told: Any) -> JobSpec:
    _must(type(told) is dict and type(told.get("model")) is dict, "the spec has no model")
    told["model"].setdefault("rope_base", DEFAULT_ROPE_BASE)  # which all had when it was no field
    return parse_spec(told)


def _step(told: Any, checkpoint: Path) -> int:
    _must(_is_number(told, LARGEST), f"the step is {str(told)[:40]}")
    named = STEP.fullmatch(checkpoint.name)
    _must(named is None or int(named[1]) == told, f"the step is {told}")
    return int(told)


def _files(told: Any) -> Files:
    _must(type(told) is dict and bool(told), "the list of files is missing")
    for name, entry in told.items():
        _must(is_plain(name), f"{name[:100]!r} is not a file name")
        _must(type(entry) is list and len(entry) == 2, f"size and CRC-32 of {name} are missing")
        _must(_is_number(entry[0], LARGEST) and _is_number(entry[1], 2**32 - 1), f"size or CRC-32 of {name} is invalid")
    return {name: (size, crc) for name, (size, crc) in told.items()}


def _rng(told: Any) -> list[int]:
    _must(type(told) is list and all(_is_number(byte, 255) for byte in told), "the random generator state is not bytes")
    return list(told)


def _sums(told: Any) -> dict[str, int]:
    whole = type(told) is dict and all(type(value) is int and abs(value) <= LARGEST + 1 for value in told.values())
    _must(whole, "the checksums are not an object of names and integers")
    return dict(told)


def _is_number(told: Any, largest: int) -> bool:
    return type(told) is int and 0 <= told <= largest


def _must(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
