"""The buffers that ZeRO allocates and frees around each unit, as FSDP2 of torch 2.13 does.

A gather fills a buffer, and the parameters are copied out of it. In forward the buffer stays until the next unit is
copied. In backward the next unit is gathered ahead. The buffer of a reduce-scatter stays until the next one begins.
gloo gathers and scatters through a copy, which the call frees.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.memory.tape import BUFFERS, GATHERED, GRADIENTS, LANE_BITS, Stretch


class ZeroUnit(NamedTuple):
    """The elements of tensors that ZeRO shards together.

    Attributes:
        numel: all elements.
        padded: elements with padding to equal shards.
        shard: elements of one shard.
        last: elements of the last tensor.
        alone: elements of unsharded experts that no other rank holds.
        apart: the experts and the rest of a layer whose experts are sharded separately, in backward order.
        turned: elements of the last tensor that is sharded along another dim than 0.
        widest: most extra elements while each tensor is copied into a type of twice the bytes.
    """

    numel: int
    padded: int
    shard: int
    last: int
    alone: int = 0
    apart: tuple[ZeroUnit, ...] = ()
    turned: int = 0
    widest: int = 0

    def join(self, experts: ZeroUnit) -> ZeroUnit:
        numel, padded = self.numel + experts.numel, self.padded + experts.padded
        widest = max(experts.widest, experts.numel + self.widest)
        return ZeroUnit(numel, padded, self.shard + experts.shard, experts.last, apart=(experts, self), widest=widest)

    @property
    def each(self) -> tuple[ZeroUnit, ...]:
        """The units that are gathered and reduced separately."""
        return self.apart or (self,)

    @property
    def met(self) -> tuple[ZeroUnit, ...]:
        """The separate units in forward order: a layer, then its experts."""
        return self.each[::-1]


NO_UNIT = ZeroUnit(0, 0, 0, 0)


class Sharding(NamedTuple):
    """The ZeRO stage and the bytes per element of compute, reduction, and shards.

    Attributes:
        keeps: stage 3 frees nothing while the rank works on a chunk.
        stages: collectives go through a copy, as with gloo.
    """

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
        """Whether whole gradients of each micro-batch accumulate in the type of the reduction."""
        return self.stage == 1 and self.compute != self.reduced

    def gather(self, unit: ZeroUnit, before: ZeroUnit) -> Stretch:
        """Return a gather in forward. `before` is the unit whose buffer is still allocated."""
        return changes(
            *self._filled(unit),
            (GATHERED, unit.padded * self.compute),
            (BUFFERS, -before.padded * self.compute),
        )

    def gather_ahead(self, unit: ZeroUnit) -> Stretch:
        """Return a gather into a buffer, before its parameters are copied out."""
        return changes(*self._filled(unit))

    def copy_out(self, unit: ZeroUnit) -> Stretch:
        return changes((GATHERED, unit.padded * self.compute), (BUFFERS, -unit.padded * self.compute))

    def _filled(self, unit: ZeroUnit) -> tuple[tuple[int, int], ...]:
        whole = unit.padded * self.compute
        if not self.mixed:
            return ((BUFFERS, whole), *self._staged(whole))
        own = unit.shard * self.compute  # in the compute type, until the call ends
        return (BUFFERS, own), (BUFFERS, whole), *self._staged(whole), (BUFFERS, -own)

    def _staged(self, num_bytes: int) -> tuple[tuple[int, int], ...]:
        return ((BUFFERS, num_bytes), (BUFFERS, -num_bytes)) if self.stages else ()

    def free(self, unit: ZeroUnit) -> Stretch:
        return change(GATHERED, -unit.padded * self.compute)

    def drop_buffer(self, unit: ZeroUnit) -> Stretch:
        return change(BUFFERS, -unit.padded * self.compute)

    def drop_reduced(self, unit: ZeroUnit) -> Stretch:
        return change(BUFFERS, -unit.padded * self.reduced)

    def widen(self, unit: ZeroUnit, *, first: bool) -> Stretch:
        """Return the accumulation of a micro-batch's gradients in the type of the reduction."""
        narrow, wide = unit.numel * self.compute, unit.numel * self.reduced
        if not first:
            return changes((GRADIENTS, -narrow))
        most = unit.widest * self.compute
        return changes((GRADIENTS, most), (GRADIENTS, wide - narrow - most))

    def reduce(self, unit: ZeroUnit, before: ZeroUnit, *, first: bool, element: int) -> Stretch:
        """Return a reduce-scatter of gradients with `element` bytes. The first one leaves a shard, others add to it.

        FSDP2 frees the last whole gradient at the end, and copies each gradient that is sharded along another dim.
        """
        lag, copy = unit.last * element, unit.turned * element
        shard = unit.shard * self.reduced
        held_bytes = unit.shard * self.held
        events = [
            (BUFFERS, -before.padded * self.reduced),
            (GRADIENTS, copy),
            (BUFFERS, unit.padded * self.reduced),
            (GRADIENTS, -(unit.numel * element - lag) - copy),
            (GRADIENTS, shard),
            *self._staged(unit.padded * self.reduced),
        ]
        if self.reduced != self.held:
            events += [(GRADIENTS, held_bytes), (GRADIENTS, -shard)]
        events.append((GRADIENTS, -lag))
        if not first:
            events.append((GRADIENTS, -held_bytes))
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
