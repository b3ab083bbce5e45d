"""Most memory that a rank's training held at once, beside what it held before its model was built."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the resident set's high-water mark starts anew


def load_libraries(*, sharded: bool) -> None:
    """Import now what is imported when it is first used: some 45 MiB of a CPU's heap that are not training's."""
    if sharded:
        import workers.trainer.parallel.zero  # noqa: F401 - takes most of a second


class Peak:
    """On a GPU what torch allocated; on a CPU how far the resident set rose, without files that are mapped into it.

    `bytes` of all that was watched so far; `beside` of what is held and is not training's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.bytes = device, 0
        self.beside = 0
        self._before = self._now()
        self.restart()

    def read(self) -> int:
        """The most since `restart`, taken in."""
        most = self._most() - self._before - self.beside
        self.bytes = max(self.bytes, most)
        return most

    def restart(self) -> None:
        """Forget the most so far: what was held meanwhile was not training's."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # a kernel without it keeps the highest of all
            CLEAR_REFS.write_text(RESET_PEAK)

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
