"""How this process gives memory back.

A rank on a CPU has its heap from jemalloc, where its host has that: then only `give_back` and `forget_shapes` matter.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os

MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8  # malloc.h
LARGE_BYTES = 4 * 2**20
SHAPES = 64
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and that of torch's layer over it
ALL_ARENAS = 4096  # jemalloc.h's MALLCTL_ARENAS_ALL
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch when it makes its first tensor


def return_large_tensors() -> None:
    """Let the kernel have a large tensor back when it is freed.

    glibc does so at first, then raises what it calls large up to 32 MiB and keeps the rest in a heap with holes: with
    ZeRO-3 on a CPU the resident set came to nearly twice the tensors. Elsewhere (musl) nothing is changed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(TRIM_THRESHOLD, LARGE_BYTES)


def reuse_what_is_freed() -> None:
    """Let smaller tensors of a CPU lie where others lay. Called before the first tensor and before other threads start.

    One heap for all threads: gloo's threads, which copy what is gathered and scattered, would have one each, and keep
    the most that ever lay there. Tensors of 2 MiB and more begin at a page's start: at 64 bytes, as torch has them
    otherwise, glibc before 2.39 puts the few bytes cut off a block's ends among its small ones, where they keep the
    block too short for the next tensor of its size. They also ask for large pages, which saves most page faults; a
    kernel that has none would have torch warn in every rank's log, and is not asked.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(ARENA_MAX, 1)
    if _has_large_pages():
        os.environ.setdefault(LARGE_PAGES, "1")


def forget_shapes() -> None:
    """Keep what was made for the last 64 shapes of products in 16 bits, not for 1,024. Called before the first product.

    Experts' products have other shapes in each step: of 20 steps of a mixture 0.7 GiB stayed, a rank's own tensors
    being 0.3. A shape that comes in each layer is among the last 64 all the same.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(SHAPES))


def give_back() -> None:
    """Let the kernel have what was freed, and what only cycles hold: a model's modules are in some."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallctl"):
        libc.mallctl(f"arena.{ALL_ARENAS}.purge".encode(), None, None, None, ctypes.c_size_t(0))
    elif hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _has_large_pages() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        try:
            page.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
    return True
