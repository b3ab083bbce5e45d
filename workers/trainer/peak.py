"""Most memory that a rank's training held at once, beside what it held before its model was built."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from planner.facts.spec import JobSpec
from workers.torch_private import late

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the resident set's high-water mark starts anew


def load_libraries(spec: JobSpec) -> None:
    """Import now what is imported when it is first used: up to 110 MiB of a CPU's heap that are not training's."""
    import numpy.random  # noqa: F401 - numpy itself waits with it

    if spec.layout.zero or spec.model.moe is not None:
        late.load_for_hidden_operations()
    if spec.layout.pp > 1:
        late.load_for_given_gradients()
    if spec.train.compile:
        late.load_compiler()


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
