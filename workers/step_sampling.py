"""Which steps are told event by event: those that are a multiple of a power of two, so that of any two who tell, the
one that tells fewer tells none the other does not."""

from __future__ import annotations

from typing import Final

HYSTERESIS: Final = (
    0.7  # of the bytes there are, which twice as many steps may take: else the level would go up and down
)
SMOOTHING: Final = 0.2  # weight of the newest step
MAX_LEVEL: Final = 30


class StepSampler:
    """Every 2^`level`th step is told, the smallest level that keeps within `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.level = 0
        self._step_bytes = self._step_s = 0.0

    def should_trace(self, step: int) -> bool:
        return step % (1 << self.level) == 0

    def record_traced_step(self, num_bytes: int, step_s: float) -> None:
        """A step of so many bytes was told; one like it comes every `step_s` seconds."""
        self._step_bytes = _smoothed(self._step_bytes, float(num_bytes))
        self._step_s = _smoothed(self._step_s, max(step_s, 1e-6))
        rate = self._step_bytes / self._step_s
        while rate / (1 << self.level) > self._bytes_per_s and self.level < MAX_LEVEL:
            self.level += 1
        while self.level and rate / (1 << (self.level - 1)) <= HYSTERESIS * self._bytes_per_s:
            self.level -= 1


def _smoothed(before: float, now: float) -> float:
    return now if not before else before + SMOOTHING * (now - before)
