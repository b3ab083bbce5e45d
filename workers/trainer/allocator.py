"""How this process gives memory back."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # malloc.h
LARGE_BYTES = 4 * 2**20


def return_large_tensors() -> None:
    """Let the kernel have a large tensor back when it is freed.

    glibc does so at first, then raises what it calls large up to 32 MiB and keeps the rest in a heap with holes: with
    ZeRO-3 on a CPU the resident set came to nearly twice the tensors. Elsewhere (musl) nothing is changed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(TRIM_THRESHOLD, LARGE_BYTES)


def return_freed() -> None:
    """Let the kernel have what lies free in the heap: after work that is not training's, whose peak would hold it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
