"""Most memory that a rank's training held at once, beside what it held before its model was built.

What of a rank's memory can be counted, and what its fullest moment had beside that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from contracts.telemetry.results import MemoryParts
from planner.facts.spec import JobSpec
from workers.torch_private import compiler
from workers.torch_private.tensors import storage_key
from workers.trainer.parallel.parallelize import Part, is_sharded, local

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the resident set's high-water mark starts anew


def load_libraries(spec: JobSpec) -> None:
    """Import now what is imported when it is first used: up to 110 MiB of a CPU's heap that are not training's."""
    import numpy.random  # noqa: F401 - numpy itself waits with it

    if spec.layout.zero or spec.model.moe is not None:
        compiler.load_for_hidden_operations()
    if spec.layout.pp > 1:
        compiler.load_for_given_gradients()
    if spec.train.compile:
        compiler.load_compiler()


class Peak:
    """On a GPU what torch allocated; on a CPU how far the resident set rose, without files that are mapped into it.

    `bytes` of all that was watched so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.bytes = device, 0
        self._kept = self._left = self._paused = 0  # of what is not training's
        self._before = self._now()
        self.restart()

    def read(self) -> int:
        """The most since `restart`, taken in."""
        most = self._most() - self._before - self._kept - self._left
        self.bytes = max(self.bytes, most)
        return most

    def restart(self) -> None:
        """Forget the most so far: what was held meanwhile was not training's."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # a kernel without it keeps the highest of all
            CLEAR_REFS.write_text(RESET_PEAK)

    def pause(self) -> None:
        """What is held until `resume` is not training's."""
        self.read()
        self._paused = self._now()

    def resume(self, kept: int) -> None:
        """`kept` bytes are still held that are not; what else there is more of, libraries have: buffers of MKL's are as
        large as the largest matrix was, and are never given back."""
        self._left += max(0, self._now() - self._paused - (kept - self._kept))
        self._kept = kept
        self.restart()

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else _status("RssAnon")

    def _most(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # Libraries and data come as they are used and stay: what of the highest is theirs is what they hold now.
        return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


Copies = Callable[[], Iterable[torch.Tensor]]


class Highest(Protocol):
    """What knows the most that was held at once."""

    def read(self) -> int:
        """Bytes, since `restart`."""

    def restart(self) -> None:
        """Forget what was held before now."""


class Standing:
    """One step of a rank, looked at action by action.

    A peak has no moment: it is known to lie in the action after which it is higher than before. What stood as that
    began was there, and where more gradients stand as it ends, nobody knows how many of them were; nor how many of
    those that an update turns into fp32, letting go of each.
    """

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer, peak: Highest, copies: Copies) -> None:
        self._part, self._optimizer, self._peak, self._copies = part, optimizer, peak, copies
        self._turns = any(held.summed is not held.master for held in part.tensors)
        self._gradients, self._highest = 0, 0
        self._then: int | None = 0
        self._complete = False
        self._optimizer_before, self._copies_before = self._optimizer_bytes(), self._copies_bytes()
        peak.read()
        peak.restart()

    @contextmanager
    def within(self) -> Iterator[None]:
        """An action of the step."""
        before = self._gradient_bytes()
        yield
        highest = self._peak.read()
        if highest > self._highest:
            unknown = self._gradient_bytes() > before or (self._turns and self._complete)
            self._highest, self._then = highest, None if unknown else before

    def complete(self) -> None:
        """Gradients are, and nothing has been updated."""
        self._gradients, self._complete = self._gradient_bytes(), True

    def told(self) -> MemoryParts:
        """After the step, and whatever was saved of it."""
        parameters = storage_bytes(local(held.tensor.detach()) for held in self._part.tensors)
        optimizer, then = self._optimizer_bytes(), self._then
        stood = parameters + optimizer + self._copies_before + (then or 0)
        made = optimizer > self._optimizer_before  # a first update makes the moments, before its peak or after it
        return MemoryParts(
            parameters=parameters,
            gradients=self._gradients,
            optimizer=optimizer,
            copies=self._copies_bytes(),
            gradients_then=then,
            beside=None if made or stood > self._highest else self._highest - stood,
        )

    def _gradient_bytes(self) -> int:
        """As they are summed, as they came, and as FSDP2 has them until it reduces them."""
        part = self._part
        holders = [p for held in part.tensors for p in (held.summed, held.tensor)]
        found = [local(p.grad) for p in holders if p.grad is not None]
        if any(is_sharded(held.tensor) for held in part.tensors):
            from workers.torch_private.fsdp import whole_gradients  # takes most of a second to import

            found += [gradient for decoder in part.chunks.values() for gradient in whole_gradients(decoder)]
        return storage_bytes(found)

    def _optimizer_bytes(self) -> int:
        """fp32 weights that are held apart, and what is kept of each weight, element by element."""
        masters = [held.master.detach() for held in self._part.tensors if held.master is not held.tensor]
        kept = [
            value
            for parameter, state in self._optimizer.state.items()
            for value in state.values()
            if torch.is_tensor(value) and value.shape == parameter.shape
        ]
        return storage_bytes(map(local, masters + kept))

    def _copies_bytes(self) -> int:
        """Those that lie where training does: a GPU's are on its host."""
        device = self._part.tensors[0].tensor.device.type
        return storage_bytes(tensor for tensor in self._copies() if tensor.device.type == device)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages that these share, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())
