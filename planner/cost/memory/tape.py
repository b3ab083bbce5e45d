"""A tape of allocations: the memory that a stretch of work adds at its peak and at its end.

Stretches join by these two figures alone. So one layer is recorded once, however many layers follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "working",
    "buffers",
    "copies",
)
PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, WORKING, BUFFERS, COPIES = range(len(PARTS))
Levels = tuple[int, ...]  # bytes by part
NO_BYTES: Levels = (0,) * len(PARTS)
# A search adds millions of levels. Packed into one integer, two levels add up in one operation.
LANE_BITS = 160  # per part; the largest spec needs 2**110 bytes


def pack(levels: Iterable[int]) -> int:
    """Return the bytes of all parts as one integer, which adds and multiplies like the levels themselves."""
    return sum(num_bytes << (LANE_BITS * part) for part, num_bytes in enumerate(levels))


def pack_part(part: int, num_bytes: int) -> int:
    """Return packed levels that hold bytes of a single part."""
    return num_bytes << (LANE_BITS * part)


def unpack(packed: int) -> Levels:
    """Return the bytes of each part, which may be negative."""
    levels = []
    for _ in PARTS:
        num_bytes = packed & ((1 << LANE_BITS) - 1)
        if num_bytes >> (LANE_BITS - 1):
            num_bytes -= 1 << LANE_BITS
        levels.append(num_bytes)
        packed = (packed - num_bytes) >> LANE_BITS
    return tuple(levels)


class Stretch(NamedTuple):
    """Bytes that a stretch of work adds to the level at its start, at its peak and at its end."""

    packed_peak: int
    packed_net: int
    peak_bytes: int
    net_bytes: int

    @property
    def peak(self) -> Levels:
        """Bytes by part at the peak."""
        return unpack(self.packed_peak)

    @property
    def net(self) -> Levels:
        """Bytes by part at the end."""
        return unpack(self.packed_net)

    def then(self, other: Stretch) -> Stretch:
        """Return this stretch followed by another one."""
        net, net_bytes = self.packed_net + other.packed_net, self.net_bytes + other.net_bytes
        peak_bytes = self.net_bytes + other.peak_bytes
        if peak_bytes > self.peak_bytes:
            return Stretch(self.packed_net + other.packed_peak, net, peak_bytes, net_bytes)
        return Stretch(self.packed_peak, net, self.peak_bytes, net_bytes)

    def times(self, count: int) -> Stretch:
        """Return `count` repetitions: the last one peaks if each adds bytes, otherwise the first."""
        if count == 1:
            return self
        if count < 1:
            return EMPTY
        before, before_bytes = self.packed_net * (count - 1), self.net_bytes * (count - 1)
        net, net_bytes = before + self.packed_net, before_bytes + self.net_bytes
        if self.net_bytes > 0:
            return Stretch(before + self.packed_peak, net, before_bytes + self.peak_bytes, net_bytes)
        return Stretch(self.packed_peak, net, self.peak_bytes, net_bytes)


EMPTY = Stretch(0, 0, 0, 0)


def join(stretches: Iterable[Stretch]) -> Stretch:
    """Return the stretches one after the other."""
    peak = net = peak_bytes = net_bytes = 0
    for stretch in stretches:
        if net_bytes + stretch.peak_bytes > peak_bytes:
            peak, peak_bytes = net + stretch.packed_peak, net_bytes + stretch.peak_bytes
        net += stretch.packed_net
        net_bytes += stretch.net_bytes
    return Stretch(peak, net, peak_bytes, net_bytes)


class Buffer:
    """Bytes that stay allocated until the last holder drops them."""

    __slots__ = ("counts", "holders", "num_bytes", "part")

    def __init__(self, num_bytes: int, part: int) -> None:
        self.num_bytes, self.part, self.holders, self.counts = num_bytes, part, 1, False


Deferred = list[tuple[Buffer, bool]]  # (buffer, whether it is allocated or freed)


class Tape:
    """Records allocations. `cut` returns what was recorded since the last cut."""

    def __init__(self) -> None:
        self._deferred: Deferred | None = None
        self._ended = False
        self._restart()

    def _restart(self) -> None:
        self._levels, self._total = [0] * len(PARTS), 0
        self._peak, self._at_peak = 0, NO_BYTES

    def take(self, num_bytes: int, part: int) -> Buffer:
        """Allocate a buffer with one holder."""
        buffer = Buffer(num_bytes, part)
        if self._deferred is None:
            self._allocate(buffer)
        elif not self._ended:
            self._deferred.append((buffer, True))
        return buffer

    def _allocate(self, buffer: Buffer) -> None:
        buffer.counts = True
        self._levels[buffer.part] += buffer.num_bytes
        self._total += buffer.num_bytes
        if self._total > self._peak:
            self._peak, self._at_peak = self._total, tuple(self._levels)

    def hold(self, buffer: Buffer) -> Buffer:
        """Add a holder and return the buffer."""
        buffer.holders += 1
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """Remove a holder from each buffer. A buffer without holders is freed."""
        for buffer in buffers:
            buffer.holders -= 1
            if buffer.holders:
                continue
            if self._deferred is not None:
                self._deferred.append((buffer, False))
            else:
                self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        if buffer.counts:
            self._levels[buffer.part] -= buffer.num_bytes
            self._total -= buffer.num_bytes

    def defer(self) -> None:
        """Record the following operations for later. Allocations after `end_deferred` are skipped."""
        self._deferred, self._ended = [], False

    def end_deferred(self) -> None:
        """Skip further allocations until `resume`."""
        self._ended = True

    def resume(self) -> Deferred:
        """Return the deferred operations, and record immediately from now on."""
        assert self._deferred is not None
        deferred, self._deferred = self._deferred, None
        return deferred

    def replay(self, deferred: Deferred) -> None:
        """Carry out operations that were deferred."""
        for buffer, is_allocated in deferred:
            if is_allocated:
                self._allocate(buffer)
            else:
                self._free(buffer)

    def touch(self, num_bytes: int, part: int) -> None:
        """Allocate a buffer and free it immediately."""
        self.drop(self.take(num_bytes, part))

    def cut(self) -> Stretch:
        """Return the stretch since the last cut and start a new one."""
        found = Stretch(pack(self._at_peak), pack(self._levels), self._peak, self._total)
        self._restart()
        return found
