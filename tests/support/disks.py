"""Disks with little room, and without a byte left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = 4096


@contextlib.contextmanager
def small_disk(disk: Path, size: str = "1m") -> Iterator[Path]:
    """There, until the end."""
    disk.mkdir()
    told = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
    if subprocess.run(told, capture_output=True, check=False).returncode != 0:
        pytest.skip("no filesystem may be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def full_disk(disk: Path) -> Iterator[Path]:
    """There, until the end."""
    with small_disk(disk):
        fill(disk)
        yield disk


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while True:
            filling.write(b"\0" * PAGE)
    assert os.statvfs(disk).f_bavail == 0
