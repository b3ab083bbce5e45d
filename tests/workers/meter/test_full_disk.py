"""A full disk loses lines of a log, but does not end the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import scale_timeout
from workers.meter.rank_exit import DiskFullTolerantWriter

PRINTS = """
from workers.meter.rank_exit import run_and_exit

def main():
    print("a line" * 10_000)
    return 0

run_and_exit(main)
"""


def test_rank_survives_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-u", "-c", PRINTS], stdout=full, stderr=full, timeout=scale_timeout(60), check=False
        )
    assert ran.returncode == 0


def test_reports_lost_bytes_when_disk_has_space_again(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("wb")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    output = DiskFullTolerantWriter(descriptor, "stdout")
    assert output.write(b"nobody reads this\n") == 18
    assert output.write(b"nor this\n") == 9
    os.dup2(log.fileno(), descriptor)
    output.write(b"step 3\n")
    output.write(b"step 4\n")
    os.close(descriptor)
    told = (tmp_path / "log").read_bytes()
    assert told == b"\n[27 bytes of output are missing: the disk was full]\nstep 3\nstep 4\n"
