"""The heap that ranks on a CPU start with."""

from __future__ import annotations

from ctypes.util import find_library
from functools import cache

# One arena for gloo's threads too. What was freed is lent to the kernel, which takes it when it has need of it, and not
# given back: the next step makes the same tensors, each page of which would be a page fault. Of 16 MiB and more it is
# given back: smaller tensors would settle in what such a one left, and the next of its size need a place of its own.
SETTINGS = "narenas:1,oversize_threshold:16777216,muzzy_decay_ms:-1"


@cache
def jemalloc() -> str | None:
    """What the loader finds jemalloc by on this host, None where it has none."""
    return find_library("jemalloc")


def heap_variables() -> dict[str, str]:
    """Have a process put its heap into jemalloc, where the host has it.

    It must be there before the process starts. glibc's heap, which is taken without it, leaves holes between tensors
    that no tensor fits into (docs/notebook/2026-11.md has both, measured).
    """
    library = jemalloc()
    return {} if library is None else {"LD_PRELOAD": library, "MALLOC_CONF": SETTINGS}
