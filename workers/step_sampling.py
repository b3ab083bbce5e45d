"""Select the steps to trace, within a byte rate."""

from __future__ import annotations

from typing import Final

# Twice the steps must fit into this fraction of the byte rate, so that the level does not oscillate.
HYSTERESIS: Final = 0.7
SMOOTHING: Final = 0.2  # weight of the newest step
MAX_LEVEL: Final = 30


class StepSampler:
    """Select every 2^`level`th step, with the smallest level that stays within `bytes_per_s`.

    The steps of a sampler with a higher level are a subset of those of each sampler with a lower level.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.level = 0
        self._step_bytes = self._step_s = 0.0

    def should_trace(self, step: int) -> bool:
        """Return True if `step` is selected."""
        return step % (1 << self.level) == 0

    def record_traced_step(self, num_bytes: int, step_s: float) -> None:
        """Update the level after a traced step of `num_bytes` bytes and `step_s` seconds."""
        self._step_bytes = _smooth(self._step_bytes, float(num_bytes))
        self._step_s = _smooth(self._step_s, max(step_s, 1e-6))
        rate = self._step_bytes / self._step_s
        while rate / (1 << self.level) > self._bytes_per_s and self.level < MAX_LEVEL:
            self.level += 1
        while self.level and rate / (1 << (self.level - 1)) <= HYSTERESIS * self._bytes_per_s:
            self.level -= 1


def _smooth(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value
