"""The most memory that a rank's training takes beyond what its process held before."""

from __future__ import annotations

import os
from pathlib import Path

import torch

FORGET_PEAK = "5"  # proc(5), /proc/pid/clear_refs: the high-water mark of the resident set starts anew


class Footprint:
    """Bytes of device memory: what torch's allocator holds of a GPU's, the resident set on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start = torch.cuda.memory_reserved() if self._is_cuda else _resident()
        self._known = self.restart()

    def restart(self) -> bool:
        """Count the peak from here on, for what came before was no training; False where the system refuses."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return True
        try:
            Path("/proc/self/clear_refs").write_text(FORGET_PEAK)
        except OSError:
            self._known = False
            return False
        return True

    def peak_bytes(self) -> int | None:
        """The highest since the last restart, above the start; None where it cannot be told."""
        if not self._known:
            return None
        highest = torch.cuda.max_memory_reserved() if self._is_cuda else _highest()
        return max(0, highest - self._start)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _highest() -> int:
    """The line reads "VmHWM:   123456 kB"."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
