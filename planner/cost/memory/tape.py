"""What is allocated and freed, in order, and the most that was there at once.

A stretch of the tape is known by two figures: its highest level over where it began, and where it ends. Stretches join
by these alone, so a layer is walked once, however many follow one another.
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
NOTHING = (0,) * len(PARTS)
Levels = tuple[int, ...]


class Stretch(NamedTuple):
    """Bytes by part over the level it began with, at its highest moment and at its end; and their sums."""

    peak: Levels
    net: Levels
    peak_bytes: int
    net_bytes: int

    def then(self, other: Stretch) -> Stretch:
        net = plus(self.net, other.net)
        higher = self.net_bytes + other.peak_bytes
        if higher > self.peak_bytes:
            return Stretch(plus(self.net, other.peak), net, higher, self.net_bytes + other.net_bytes)
        return Stretch(self.peak, net, self.peak_bytes, self.net_bytes + other.net_bytes)

    def times(self, count: int) -> Stretch:
        """So many of them in a row: the last is the highest if each leaves something, else the first."""
        if count == 1:
            return self
        if count < 1:
            return EMPTY
        before, before_bytes = times(self.net, count - 1), self.net_bytes * (count - 1)
        net = plus(before, self.net)
        if self.net_bytes > 0:
            return Stretch(plus(before, self.peak), net, before_bytes + self.peak_bytes, count * self.net_bytes)
        return Stretch(self.peak, net, self.peak_bytes, count * self.net_bytes)


def stretch(peak: Levels, net: Levels) -> Stretch:
    return Stretch(peak, net, sum(peak), sum(net))


EMPTY = stretch(NOTHING, NOTHING)


def plus(a: Levels, b: Levels) -> Levels:
    # Part by part: this is most of what a search does.
    a0, a1, a2, a3, a4, a5, a6, a7, a8 = a
    b0, b1, b2, b3, b4, b5, b6, b7, b8 = b
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8


def times(a: Levels, count: int) -> Levels:
    return tuple([x * count for x in a])


def level(part: int, num_bytes: int) -> Levels:
    """So much of one part."""
    found = [0] * len(PARTS)
    found[part] = num_bytes
    return tuple(found)


def joined(stretches: Iterable[Stretch]) -> Stretch:
    """One after the other."""
    found = EMPTY
    for stretch in stretches:
        found = found.then(stretch)
    return found


class Buffer:
    """Bytes that stay until nobody holds them."""

    __slots__ = ("counts", "holders", "num_bytes", "part")

    def __init__(self, num_bytes: int, part: int) -> None:
        self.num_bytes, self.part, self.holders, self.counts = num_bytes, part, 1, False


Later = list[tuple[Buffer, bool]]  # taken, or freed


class Tape:
    """Levels as they change; `cut` gives what was recorded since the last."""

    def __init__(self) -> None:
        self._later: Later | None = None
        self._ended = False
        self._restart()

    def _restart(self) -> None:
        self._levels, self._total = [0] * len(PARTS), 0
        self._peak, self._at_peak = 0, NOTHING

    def take(self, num_bytes: int, part: int) -> Buffer:
        """Allocate for one holder."""
        buffer = Buffer(num_bytes, part)
        if self._later is None:
            self._count(buffer)
        elif not self._ended:
            self._later.append((buffer, True))
        return buffer

    def _count(self, buffer: Buffer) -> None:
        buffer.counts = True
        self._levels[buffer.part] += buffer.num_bytes
        self._total += buffer.num_bytes
        if self._total > self._peak:
            self._peak, self._at_peak = self._total, tuple(self._levels)

    def hold(self, buffer: Buffer) -> Buffer:
        """One holder more."""
        buffer.holders += 1
        return buffer

    def drop(self, *buffers: Buffer) -> None:
        """One holder less of each; the last frees."""
        for buffer in buffers:
            buffer.holders -= 1
            if buffer.holders:
                continue
            if self._later is not None:
                self._later.append((buffer, False))
            else:
                self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        if buffer.counts:
            self._levels[buffer.part] -= buffer.num_bytes
            self._total -= buffer.num_bytes

    def put_off(self) -> None:
        """What follows does not happen yet, and what is taken after `end`, never."""
        self._later, self._ended = [], False

    def end(self) -> None:
        self._ended = True

    def resume(self) -> Later:
        """From now on everything happens at once; what was put off does when `catch_up` is given it."""
        assert self._later is not None
        later, self._later = self._later, None
        return later

    def catch_up(self, later: Later) -> None:
        for buffer, taken in later:
            if taken:
                self._count(buffer)
            else:
                self._free(buffer)

    def briefly(self, num_bytes: int, part: int) -> None:
        """Allocate and free at once."""
        self.drop(self.take(num_bytes, part))

    def cut(self) -> Stretch:
        found = Stretch(self._at_peak, tuple(self._levels), self._peak, self._total)
        self._restart()
        return found
