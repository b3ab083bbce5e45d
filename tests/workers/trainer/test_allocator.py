"""Freed memory returns to the kernel or is reused."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, base_environment
from workers.host.programs import get_heap_variables

# A small block after large ones pins the heap that they would lie in.
PROGRAM = """
import sys
from pathlib import Path
from workers.trainer.memory import configure_large_allocations

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "set":
    configure_large_allocations()
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
def test_freed_memory_leaves_the_resident_set(setting: str, least: int, most: int) -> None:
    argv = [sys.executable, "-c", PROGRAM, setting]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most


# A small tensor that stays, beside one of 2.8 MiB after the other, of which there is never more than one: first in one
# thread, then once in each of eight.
REUSED = """
import sys
import threading
from pathlib import Path

import torch

from workers.trainer.memory import configure_large_allocations, use_single_heap

configure_large_allocations()
if sys.argv[1] == "set":
    use_single_heap()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def one_after_the_other(several):
    for _ in range(several):
        large = torch.ones(737_280)
        kept.append(torch.ones(4))
        del large

def in_turn():
    with turn:
        one_after_the_other(1)
    all_done.wait()

kept, turn, all_done = [], threading.Lock(), threading.Barrier(8)
before = resident()
one_after_the_other(60)
print(resident() - before)
before = resident()
threads = [threading.Thread(target=in_turn) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


def _grown(setting: str) -> list[float]:
    """Return the growth in MiB, with one thread and with eight."""
    argv = [sys.executable, "-c", REUSED, setting]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    return [int(text) / 2**20 for text in done.stdout.split()]


def test_reuses_memory_that_another_thread_freed() -> None:
    """With ZeRO-3 and tables of 49 MiB, the heap of a rank grew in every step."""
    again, threads = _grown("set")
    assert again < 12
    assert threads < 8


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver() != ("glibc", "2.36"), reason="seen with this one")
def test_does_not_reuse_memory_without_the_setting() -> None:
    again, threads = _grown("unset")
    assert again > 80
    assert threads > 18


# One layer's product with as many rows as experts have from step to step, in one thread and in the heap that ranks
# have: the C library's keeps as much by itself.
SHAPES = """
import sys
from pathlib import Path

import torch

from workers.trainer.memory import limit_primitive_cache

if sys.argv[1] == "set":
    limit_primitive_cache()
torch.set_num_threads(1)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

weight = torch.ones(768, 256, dtype=torch.bfloat16)

def multiply(rows):
    for count in rows:
        torch.ones(count, 256, dtype=torch.bfloat16) @ weight.T

multiply(range(64, 128))
before = resident()
multiply(range(128, 384))
print(resident() - before)
"""


def _kept_of_shapes(setting: str) -> float:
    argv = [sys.executable, "-c", SHAPES, setting]
    environment = {**base_environment(), **get_heap_variables()}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout) / 2**20


def test_caches_few_primitives_of_16_bit_matmuls() -> None:
    """A rank with 8 experts grew by 0.7 GiB in 20 steps."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("products in 16 bits are not oneDNN's here")
    assert _kept_of_shapes("set") < 6 < _kept_of_shapes("unset")
