"""A disk without a byte left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = 4096


@contextlib.contextmanager
def full_disk(disk: Path) -> Iterator[Path]:
    """There, until the end."""
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("no filesystem may be mounted here")
    try:
        fill(disk)
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while True:
            filling.write(b"\0" * PAGE)
    assert os.statvfs(disk).f_bavail == 0
