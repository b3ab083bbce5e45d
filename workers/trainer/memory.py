"""Settings of a rank's memory allocator, and the peak memory of training with its breakdown.

A rank on a CPU uses jemalloc if the host has it. Then only two functions for the allocator matter:
`release_free_memory` and `limit_primitive_cache`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from contracts.telemetry.results import MemoryParts
from planner.facts.spec import JobSpec
from workers.torch_private import compiler
from workers.torch_private.compiler import storage_key
from workers.trainer.parallel.parallelize import ModelShard, get_local, is_sharded

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # resets the high-water mark of the resident set, see proc(5)
TensorSource = Callable[[], Iterable[torch.Tensor]]
MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8  # malloc.h
LARGE_ALLOCATION_BYTES = 4 * 2**20
MAX_CACHED_SHAPES = 64
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # of oneDNN, and of torch's integration of oneDNN
ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL in jemalloc.h
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it creates its first tensor


def preload_lazy_imports(spec: JobSpec) -> None:
    """Import libraries that torch imports at first use. They take up to 110 MiB of a CPU heap."""
    import numpy.random  # noqa: F401 - numpy itself waits with it

    if spec.layout.zero or spec.model.moe is not None:
        compiler.load_dynamo()
    if spec.layout.pp > 1:
        compiler.load_symbolic_shapes()
    if spec.train.compile:
        compiler.load_compiler()


class PeakMemory:
    """Measure the peak memory of training, relative to the memory before the model was built.

    On a GPU this is the memory that torch allocated. On a CPU it is the growth of the resident set without mapped
    files. `max_bytes` is the maximum over all intervals so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.max_bytes = device, 0
        self._retained_bytes = self._library_bytes = self._paused = 0  # bytes that do not belong to training
        self._before = self._get_current()
        self.restart()

    def read(self) -> int:
        """Return the peak in bytes since `restart`, and update `max_bytes`."""
        peak = self._get_peak() - self._before - self._retained_bytes - self._library_bytes
        self.max_bytes = max(self.max_bytes, peak)
        return peak

    def restart(self) -> None:
        """Start a new interval."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # older kernels cannot reset the peak
            CLEAR_REFS.write_text(RESET_PEAK)

    def pause(self) -> None:
        """Exclude allocations until `resume`."""
        self.read()
        self._paused = self._get_current()

    def resume(self, retained_bytes: int) -> None:
        """Continue after `pause`. `retained_bytes` of the allocations remain, and stay excluded.

        Other growth belongs to libraries. MKL buffers are as large as the largest matrix, and MKL never frees them.
        """
        self._library_bytes += max(0, self._get_current() - self._paused - (retained_bytes - self._retained_bytes))
        self._retained_bytes = retained_bytes
        self.restart()

    def _get_current(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else _status("RssAnon")

    def _get_peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # Pages of libraries and data stay once they are used, so their current size is their size at the peak.
        return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def _status(name: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class PeakReader(Protocol):
    """Report the peak memory of an interval."""

    def read(self) -> int:
        """Return the peak in bytes since `restart`."""

    def restart(self) -> None:
        """Start a new interval."""


class MemoryProbe:
    """Break down the memory of one training step, action by action.

    An action that raises the peak contains the peak. The tensors at its start existed at the peak. If the action adds
    gradients, the number of gradients at the peak is unknown. It is also unknown if the update converts gradients to
    fp32 one at a time.
    """

    def __init__(
        self, part: ModelShard, optimizer: torch.optim.Optimizer, peak: PeakReader, copies: TensorSource
    ) -> None:
        self._part, self._optimizer, self._peak, self._copies = part, optimizer, peak, copies
        self._converts_gradients = any(held.gradient_holder is not held.master for held in part.parameters)
        self._complete_gradient_bytes, self._highest = 0, 0
        self._gradients_at_peak: int | None = 0
        self._complete = False
        self._optimizer_before, self._copies_before = self._optimizer_bytes(), self._copies_bytes()
        peak.read()
        peak.restart()

    @contextmanager
    def measure_action(self) -> Iterator[None]:
        """Measure one action of the step."""
        before = self._gradient_bytes()
        yield
        highest = self._peak.read()
        if highest > self._highest:
            unknown = self._gradient_bytes() > before or (self._converts_gradients and self._complete)
            self._highest, self._gradients_at_peak = highest, None if unknown else before

    def record_gradients(self) -> None:
        """Record the size of the complete gradients, before the update."""
        self._complete_gradient_bytes, self._complete = self._gradient_bytes(), True

    def get_breakdown(self) -> MemoryParts:
        """Return the breakdown. Call this after the step and after a checkpoint is saved."""
        parameters = get_storage_bytes(get_local(held.weight.detach()) for held in self._part.parameters)
        optimizer, then = self._optimizer_bytes(), self._gradients_at_peak
        stood = parameters + optimizer + self._copies_before + (then or 0)
        made = optimizer > self._optimizer_before  # The first update creates the moments, before or after its peak.
        return MemoryParts(
            parameters=parameters,
            gradients=self._complete_gradient_bytes,
            optimizer=optimizer,
            copies=self._copies_bytes(),
            gradients_then=then,
            beside=None if made or stood > self._highest else self._highest - stood,
        )

    def _gradient_bytes(self) -> int:
        """Return the bytes of gradients: accumulated, as computed, and unsharded by FSDP2."""
        part = self._part
        holders = [p for held in part.parameters for p in (held.gradient_holder, held.weight)]
        found = [get_local(p.grad) for p in holders if p.grad is not None]
        if any(is_sharded(held.weight) for held in part.parameters):
            from workers.torch_private.fsdp import iter_unsharded_gradients  # takes peak of a second to import

            found += [gradient for decoder in part.chunks.values() for gradient in iter_unsharded_gradients(decoder)]
        return get_storage_bytes(found)

    def _optimizer_bytes(self) -> int:
        """Return the bytes of separate fp32 masters and of the optimizer state per element."""
        masters = [held.master.detach() for held in self._part.parameters if held.master is not held.weight]
        retained_bytes = [
            value
            for parameter, state in self._optimizer.state.items()
            for value in state.values()
            if torch.is_tensor(value) and value.shape == parameter.shape
        ]
        return get_storage_bytes(map(get_local, masters + retained_bytes))

    def _copies_bytes(self) -> int:
        """Return the bytes of checkpoint copies on the training device. A GPU's copies are on its host."""
        device = self._part.parameters[0].weight.device.type
        return get_storage_bytes(tensor for tensor in self._copies() if tensor.device.type == device)


def get_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total size of the storages of tensors. A shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


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
