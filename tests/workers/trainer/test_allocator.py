"""Large tensors go back to the kernel when they are freed; without the setting glibc keeps them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

# A small block after large ones pins the heap that they would lie in.
PROGRAM = """
import sys
from pathlib import Path
from workers.trainer.allocator import return_large_tensors

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "set":
    return_large_tensors()
first = bytearray(8 * 2**20)
del first
before = resident()
blocks = [bytearray(8 * 2**20) for _ in range(20)]
pin = bytearray(100_000)
del blocks
print(resident() - before)
"""


@pytest.mark.parametrize(
    ("setting", "least", "most"), [("set", -(2**20), 8 * 2**20), ("unset", 100 * 2**20, 200 * 2**20)]
)
def test_what_is_freed_leaves_the_resident_set(setting: str, least: int, most: int) -> None:
    argv = [sys.executable, "-c", PROGRAM, setting]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most
