"""What ZeRO's units allocate and free around the layers they shard, as FSDP2 of torch 2.13 does.

A gather fills a buffer that its parameters are copied out of; in forward it stays until the next unit has been copied,
in backward the next is gathered ahead. A reduce-scatter's buffer stays until the next one begins. gloo gathers and
scatters by way of a copy, which is gone when the call is over.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.memory.tape import BUFFERS, GATHERED, GRADIENTS, LANE_BITS, Stretch


class Unit(NamedTuple):
    """Elements of what is sharded together: whole, filled up to equal shards, one shard, and the last tensor's.
    `turned`: of the last tensor that is cut along another than its first dimension. `widest`: how many more there are
    at most while its tensors, one after the other, are copied into a type of twice the bytes.
    `alone`: of experts that no other rank holds, which lie whole beside it. `apart`: of a layer whose experts are
    sharded by themselves, the units it is the sum of, in the order that a backward is through with them."""

    numel: int
    padded: int
    shard: int
    last: int
    alone: int = 0
    apart: tuple[Unit, ...] = ()
    turned: int = 0
    widest: int = 0

    def join(self, experts: Unit) -> Unit:
        numel, padded = self.numel + experts.numel, self.padded + experts.padded
        widest = max(experts.widest, experts.numel + self.widest)
        return Unit(numel, padded, self.shard + experts.shard, experts.last, apart=(experts, self), widest=widest)

    @property
    def each(self) -> tuple[Unit, ...]:
        """Those that are gathered and reduced one by one."""
        return self.apart or (self,)

    @property
    def met(self) -> tuple[Unit, ...]:
        """The same in the order in which a forward comes to them, and a backward: a layer, then its experts."""
        return self.each[::-1]


NO_UNIT = Unit(0, 0, 0, 0)


class Sharding(NamedTuple):
    """ZeRO's stage, and bytes of an element as computed with, as reduced, and as held in shards. `keeps`: stage 3 frees
    nothing while the rank works on a chunk; `stages` as `Shape` has it."""

    stage: int
    compute: int
    reduced: int
    held: int
    keeps: bool = False
    stages: bool = False

    @property
    def frees_each(self) -> bool:
        """Whether a unit is freed after each use."""
        return self.stage == 3 and not self.keeps

    @property
    def mixed(self) -> bool:
        return self.compute != self.held

    @property
    def widens(self) -> bool:
        """Whether whole gradients are added up in another type than they come in, each micro-batch's at its end."""
        return self.stage == 1 and self.compute != self.reduced

    def gather(self, unit: Unit, before: Unit) -> Stretch:
        """In forward; `before` is the unit whose buffer is still there."""
        return changes(
            *self._filled(unit),
            (GATHERED, unit.padded * self.compute),
            (BUFFERS, -before.padded * self.compute),
        )

    def gather_ahead(self, unit: Unit) -> Stretch:
        """The buffer alone."""
        return changes(*self._filled(unit))

    def copy_out(self, unit: Unit) -> Stretch:
        return changes((GATHERED, unit.padded * self.compute), (BUFFERS, -unit.padded * self.compute))

    def _filled(self, unit: Unit) -> tuple[tuple[int, int], ...]:
        whole = unit.padded * self.compute
        if not self.mixed:
            return ((BUFFERS, whole), *self._staged(whole))
        own = unit.shard * self.compute  # in the compute type, until the call is over
        return (BUFFERS, own), (BUFFERS, whole), *self._staged(whole), (BUFFERS, -own)

    def _staged(self, num_bytes: int) -> tuple[tuple[int, int], ...]:
        return ((BUFFERS, num_bytes), (BUFFERS, -num_bytes)) if self.stages else ()

    def free(self, unit: Unit) -> Stretch:
        return change(GATHERED, -unit.padded * self.compute)

    def drop_buffer(self, unit: Unit) -> Stretch:
        return change(BUFFERS, -unit.padded * self.compute)

    def drop_reduced(self, unit: Unit) -> Stretch:
        return change(BUFFERS, -unit.padded * self.reduced)

    def widen(self, unit: Unit, *, first: bool) -> Stretch:
        """A micro-batch's gradients join those that wait in the type they are reduced in."""
        narrow, wide = unit.numel * self.compute, unit.numel * self.reduced
        if not first:
            return changes((GRADIENTS, -narrow))
        most = unit.widest * self.compute
        return changes((GRADIENTS, most), (GRADIENTS, wide - narrow - most))

    def reduce(self, unit: Unit, before: Unit, *, first: bool, element: int) -> Stretch:
        """`element` bytes of each whole gradient; the first leaves a shard, others are added to it. FSDP2's loop over
        whole gradients lets go of the last one when all is done, and puts a copy in the place of each that is cut
        along another dimension."""
        lag, copy = unit.last * element, unit.turned * element
        shard = unit.shard * self.reduced
        kept = unit.shard * self.held
        events = [
            (BUFFERS, -before.padded * self.reduced),
            (GRADIENTS, copy),
            (BUFFERS, unit.padded * self.reduced),
            (GRADIENTS, -(unit.numel * element - lag) - copy),
            (GRADIENTS, shard),
            *self._staged(unit.padded * self.reduced),
        ]
        if self.reduced != self.held:
            events += [(GRADIENTS, kept), (GRADIENTS, -shard)]
        events.append((GRADIENTS, -lag))
        if not first:
            events.append((GRADIENTS, -kept))
        return changes(*events)


def change(part: int, num_bytes: int) -> Stretch:
    """Return the stretch of one allocation, or of one free for negative bytes."""
    packed = num_bytes << (LANE_BITS * part)
    return Stretch(packed, packed, num_bytes, num_bytes) if num_bytes > 0 else Stretch(0, packed, 0, num_bytes)


def changes(*events: tuple[int, int]) -> Stretch:
    """Return the stretch of allocations and frees in order, each as (part, bytes)."""
    peak = net = peak_bytes = net_bytes = 0
    for part, num_bytes in events:
        net += num_bytes << (LANE_BITS * part)
        net_bytes += num_bytes
        if net_bytes > peak_bytes:
            peak, peak_bytes = net, net_bytes
    return Stretch(peak, net, peak_bytes, net_bytes)
