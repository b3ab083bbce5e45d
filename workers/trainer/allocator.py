"""Settings of the memory allocator of a rank.

A rank on a CPU uses jemalloc if the host has it. Then only `release_free_memory` and `limit_primitive_cache` matter.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os

MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8  # malloc.h
LARGE_ALLOCATION_BYTES = 4 * 2**20
MAX_CACHED_SHAPES = 64
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # of oneDNN, and of torch's integration of oneDNN
ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL in jemalloc.h
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it creates its first tensor


def configure_large_allocations() -> None:
    """Return the memory of a large tensor to the kernel when the tensor is freed.

    glibc raises its threshold for large allocations up to 32 MiB, and keeps the memory in a heap with holes. With
    ZeRO-3 on a CPU, the resident set was almost twice the size of the tensors. Other C libraries (musl) are not
    changed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, LARGE_ALLOCATION_BYTES)
        libc.mallopt(TRIM_THRESHOLD, LARGE_ALLOCATION_BYTES)


def use_single_heap() -> None:
    """Reuse the memory of freed CPU tensors. Call this before the first tensor and before other threads start.

    All threads share one heap. Otherwise each gloo thread keeps its own heap at its largest size.
    Tensors of 2 MiB and more start at a page. Torch aligns tensors to 64 bytes by default. Then glibc before 2.39 puts
    the remainder of a block into its small bins, and the block becomes too short for the next tensor of its size.
    Such tensors also use large pages, which avoids most page faults. On a kernel without large pages, torch would print
    a warning on every rank, so the setting is left out there.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(ARENA_MAX, 1)
    if _has_large_pages():
        os.environ.setdefault(LARGE_PAGES, "1")


def limit_primitive_cache() -> None:
    """Cache the oneDNN primitives of 64 matmul shapes instead of 1,024. Call this before the first matmul.

    The matmuls of experts have different shapes in each step. With the default, 20 steps of a mixture-of-experts model
    kept 0.7 GiB, compared with 0.3 GiB of tensors. Shapes that occur in each layer stay among the last 64.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(MAX_CACHED_SHAPES))


def release_free_memory() -> None:
    """Return freed memory to the kernel, including objects in reference cycles."""
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
