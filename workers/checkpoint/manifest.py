"""Manifest of a checkpoint, and safe access to its files.

Files may come from another host or a damaged disk, so everything is checked.
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


def is_plain_file_name(name: str) -> bool:
    """Return whether a file name stays in its folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(name) <= 255


def open_regular(path: str, flags: int) -> int:
    """Open a regular file. Symlinks could lead anywhere, and a FIFO would block.

    Raises:
        OSError: if the path is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if the file is larger.
    """
    with open(path, "rb", opener=open_regular) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"the file has more than {max_bytes:,} bytes")
    return data


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, "rb", opener=open_regular) as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


MANIFEST = "manifest.json"
VERSION = 1
STEP = re.compile(r"step-(\d{8,})")
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_INT64 = 2**63 - 1

Files = dict[str, tuple[int, int]]


class Manifest(NamedTuple):
    """Store the spec and step of a checkpoint, sizes and CRC-32 of its files, and tensor checksums.

    Older checkpoints have no tensor checksums.
    """

    spec: JobSpec
    step: int
    files: Files
    rng: list[int]
    sums: dict[str, int]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        UserError: if the manifest is unreadable or invalid.
    """
    try:
        content = json.loads(read_limited(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
        _check(type(content) is dict, "the JSON is not an object")
        _check(
            content["version"] == VERSION,
            f"the version is {str(content['version'])[:40]}, expected {VERSION}",
        )
        return Manifest(
            _parse_spec(content["spec"]),
            _parse_step(content["step"], checkpoint),
            _parse_files(content["files"]),
            _parse_rng(content["rng"]),
            _parse_checksums(content.get("sums", {})),
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


def _parse_spec(value: Any) -> JobSpec:
    _check(type(value) is dict and type(value.get("model")) is dict, "the spec has no model")
    value["model"].setdefault("rope_base", DEFAULT_ROPE_BASE)  # default before the field existed
    return parse_spec(value)


def _parse_step(value: Any, checkpoint: Path) -> int:
    _check(_is_number(value, MAX_INT64), f"the step is {str(value)[:40]}")
    name_match = STEP.fullmatch(checkpoint.name)
    _check(name_match is None or int(name_match[1]) == value, f"the step is {value}")
    return int(value)


def _parse_files(value: Any) -> Files:
    _check(type(value) is dict and bool(value), "the list of files is missing")
    for name, entry in value.items():
        _check(is_plain_file_name(name), f"{name[:100]!r} is not a file name")
        _check(type(entry) is list and len(entry) == 2, f"size and CRC-32 of {name} are missing")
        _check(
            _is_number(entry[0], MAX_INT64) and _is_number(entry[1], 2**32 - 1), f"size or CRC-32 of {name} is invalid"
        )
    return {name: (size, crc) for name, (size, crc) in value.items()}


def _parse_rng(value: Any) -> list[int]:
    _check(
        type(value) is list and all(_is_number(byte, 255) for byte in value), "the random generator state is not bytes"
    )
    return list(value)


def _parse_checksums(value: Any) -> dict[str, int]:
    valid = type(value) is dict and all(type(crc) is int and abs(crc) <= MAX_INT64 + 1 for crc in value.values())
    _check(valid, "the checksums are not an object of names and integers")
    return dict(value)


def _is_number(value: Any, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


def _check(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
