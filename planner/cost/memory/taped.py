"""The memory of a rank over a step, from a tape of allocations along its list of actions, and in the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from operator import mul
from typing import NamedTuple

from planner.cost.memory.chunk import Chunk, Turn, record_action
from planner.cost.memory.moments import (
    ActionType,
    Moment,
    StageSchedule,
    find_flights,
    find_peaks,
    find_peaks_of_stages,
)
from planner.cost.memory.pieces import record_layer
from planner.cost.memory.rank import Peak, Sized, StageMemory
from planner.cost.memory.tape import ACTIVATIONS, BUFFERS, GRADIENTS, WORKING, Stretch, pack_part, unpack
from planner.facts.model_shapes import ParameterUnit
from planner.facts.precision import FP32_BYTES
from planner.facts.stages import BUCKET_BYTES, is_expert_unit

MAX_CONVERTED_ELEMENTS = 2**24  # that an update converts to fp32 together, or one larger tensor


class TapedMemory(StageMemory):
    """The memory of each pipeline stage of a plan, for stacks that allocate as PyTorch's autograd and FSDP2 do."""

    def find_peak(self, stage: int) -> Peak:
        rank = self.get_rank(stage)
        costs, most, found = [_get_costs(chunk) for chunk in rank.kinds], 0, None
        for moment in find_peaks(self._get_schedule(stage), self.plan.train.micro_batches):
            total = _find_max_bytes([moment], costs, rank.message)
            if total > most:
                most, found = total, moment
        update = self._get_update(stage)
        if found is None or update.num_bytes > most:
            return Peak(unpack(rank.persistent.packed + update.packed), "in the update")
        return Peak(unpack(rank.persistent.packed + _get_levels(found, costs, rank.message)), found.words)

    def get_max_bytes(self, stages: tuple[int, ...], limit: int | None = None) -> int:
        stage = stages[0]
        rank, schedule, micro_batches = self.get_rank(stage), self._get_schedule(stage), self.plan.train.micro_batches
        persistent, capacity = rank.persistent.num_bytes, None
        if limit is not None:
            capacity = limit - persistent
            saved = [_get_saved_bytes(chunk) for chunk in rank.kinds]
            most: int = max(sum(map(mul, saved, flight)) for flight in find_flights(schedule, stages, micro_batches))
            if most > capacity:
                return persistent + most
        costs = [_get_costs(chunk) for chunk in rank.kinds]
        moments = find_peaks_of_stages(schedule, stages, micro_batches)
        most = _find_max_bytes(moments, costs, rank.message, capacity)
        return persistent + max(most, self._get_update(stage).num_bytes)

    def get_min_bytes(self, stage: int) -> int:
        is_sharded, mix = bool(self.plan.layout.zero), self.plan.mix
        element = mix.sharded_bytes if is_sharded else mix.gradient_bytes
        return self.get_rank(stage).persistent.num_bytes + self.count_elements(stage, shard=is_sharded) * element

    def get_gradient_bytes(self, stage: int) -> int:
        rank, mix = self.get_rank(stage), self.plan.mix
        if not self.plan.layout.zero:
            return unpack(rank.persistent.packed)[GRADIENTS] + self.count_elements(stage) * mix.gradient_bytes
        # FSDP2 does not shard experts that no other rank holds.
        alone = sum(chunk.parameters.alone for chunk in rank.chunks)
        return (self.count_elements(stage, shard=True) - alone) * mix.sharded_bytes + alone * mix.gradient_bytes

    def get_layer_bytes(self, *, moe: bool = False) -> int:
        return record_layer(self.batch, "keep", moe=moe, waits=False).forward.net_bytes

    def _get_schedule(self, stage: int) -> StageSchedule:
        layout, rank = self.plan.layout, self.get_rank(stage)
        schedule = layout.schedule if layout.pp > 1 else "1f1b"
        frees_forward = any(chunk.left for chunk in rank.kinds)
        return StageSchedule(schedule, layout.pp, layout.virtual_stages, stage, rank.kind_of, frees_forward)

    def _get_update(self, stage: int) -> Sized:
        """Return gradients and their fp32 copies in the update; zero if the update copies none."""
        layout, mix = self.plan.layout, self.plan.mix
        if layout.zero or mix.gradient_bytes == mix.sharded_bytes:
            return Sized(0, 0)
        units, replicas = self.plan.partition.get_units(stage), layout.replica_ranks
        found = find_update_peak(units, mix.gradient_bytes, summed=replicas > 1, experts_summed=replicas > layout.ep)
        packed = pack_part(GRADIENTS, found.gradients) + pack_part(BUFFERS, found.fp32)
        return Sized(packed, found.gradients + found.fp32)


class _ChunkCosts:
    """The memory effects of one kind of chunk: in flight, with pending weight gradients, and by type of action.

    Pending weight gradients hold the gradient of the chunk's output and the graph of its forward. So the chunk's input
    and its gradient stay after the messages that carried them are freed.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        parameters, message = chunk.parameters, chunk.batch.shard_bytes
        self._usual_turn = Turn(first=False, last=False)
        # Only ZeRO-1 and 2 gather in the first forward, and only a chunk that is left frees in the last one.
        self._has_equal_forwards = not chunk.left and chunk.sharding.stage in (0, 3) and not chunk.sharding.keeps
        kinds = "FBW" if chunk.waits else "FB"
        self._usual = {kind: record_action(chunk, kind, self._usual_turn) for kind in kinds}
        forward, backward = self._usual["F"], self._usual["B"]
        self.flight = Sized(forward.packed_net, forward.net_bytes)
        input_bytes, output_bytes = message * (not parameters.first), message * (not parameters.last)
        packed = pack_part(ACTIVATIONS, input_bytes - output_bytes) + pack_part(WORKING, output_bytes)
        self.pending = Sized(
            forward.packed_net + backward.packed_net + packed, forward.net_bytes + backward.net_bytes + input_bytes
        )
        self._stretches: dict[tuple[str, Turn], Stretch] = {}
        self._passed: dict[ActionType, Sized] = {}

    def get_stretch(self, action: ActionType) -> Stretch:
        """Return the effect of an action."""
        turn = Turn(*action[2:])
        if turn == self._usual_turn or (action.kind == "F" and self._has_equal_forwards):
            return self._usual[action.kind]
        key = action.kind, turn
        if key not in self._stretches:
            self._stretches[key] = record_action(self._chunk, action.kind, turn)
        return self._stretches[key]

    def get_passed(self, action: ActionType) -> Sized:
        """Return how much more a first or last action leaves than a usual one."""
        if action not in self._passed:
            one, usual = self.get_stretch(action), self._usual[action.kind]
            self._passed[action] = Sized(one.packed_net - usual.packed_net, one.net_bytes - usual.net_bytes)
        return self._passed[action]


@cache
def _get_costs(chunk: Chunk) -> _ChunkCosts:
    return _ChunkCosts(chunk)


@cache
def _get_saved_bytes(chunk: Chunk) -> int:
    """Return the bytes that the layers of a chunk in flight save."""
    return sum(
        count * record_layer(chunk.batch, "keep", moe=moe, waits=chunk.waits).forward.net_bytes
        for moe, count in chunk.parameters.runs
    )


def _find_max_bytes(moments: Sequence[Moment], costs: list[_ChunkCosts], message: int, limit: int | None = None) -> int:
    """Return the bytes of the highest moment, or of the first one above `limit`.

    Neighboring moments usually share their action and the actions before, so their sum is kept.
    """
    flights, pending = [c.flight.num_bytes for c in costs], [c.pending.num_bytes for c in costs]
    most, start, before = 0, 0, None
    for moment in moments:
        if before is None or moment.action != before.action or moment.passed != before.passed:
            before = moment
            start = costs[moment.action.chunk].get_stretch(moment.action).peak_bytes + sum(
                count * costs[action.chunk].get_passed(action).num_bytes for action, count in moment.passed
            )
        total: int = start + moment.messages * message
        total += sum(map(mul, flights, moment.flight)) + sum(map(mul, pending, moment.pending))
        if total > most:
            most = total
            if limit is not None and most > limit:
                return most
    return most


def _get_levels(moment: Moment, costs: list[_ChunkCosts], message: int) -> int:
    """Return the packed levels of a moment."""
    states, gradients = moment.shared
    packed = pack_part(BUFFERS, (moment.messages + states + gradients) * message)
    packed -= pack_part(ACTIVATIONS, states * message) + pack_part(WORKING, gradients * message)
    packed += costs[moment.action.chunk].get_stretch(moment.action).packed_peak
    for cost, flight, pending in zip(costs, moment.flight, moment.pending, strict=True):
        packed += cost.flight.packed * flight + cost.pending.packed * pending
    return packed + sum(count * costs[action.chunk].get_passed(action).packed for action, count in moment.passed)


class UpdatePeak(NamedTuple):
    """Bytes of gradients in their own type and in fp32 at the peak of the update."""

    gradients: int
    fp32: int


@cache
def find_update_peak(
    units: tuple[ParameterUnit, ...], element: int, *, summed: bool, experts_summed: bool
) -> UpdatePeak:
    """Return the peak while gradients of `element` bytes are converted to fp32. Each is freed after its conversion.

    Gradients of replicas that were `summed` in buckets share memory, which is freed with the last one of a bucket.
    """
    sizes = [parameter.numel for unit in units for parameter in unit.parameters]
    bucket_of = dict(enumerate(range(len(sizes))))
    for experts, shares in ((False, summed), (True, experts_summed)):
        if shares:
            bucket_of |= _find_buckets(units, element, experts=experts)
    left: Counter[int] = Counter()
    for index, size in enumerate(sizes):
        left[bucket_of[index]] += size
    whole, came = left.copy(), sum(sizes) * element
    most = UpdatePeak(came, 0)
    for together in _group_conversions(sizes):
        fp32 = 0
        for index in together:
            fp32 += sizes[index] * FP32_BYTES
            most = max(most, UpdatePeak(came, fp32), key=sum)
            bucket = bucket_of[index]
            left[bucket] -= sizes[index]
            came -= 0 if left[bucket] else whole[bucket] * element
    return most


def _group_conversions(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of tensors that are converted together."""
    together: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if filled + size > MAX_CONVERTED_ELEMENTS:
            yield together
            together, filled = [], 0
        together.append(index)
        filled += size
    yield together


def _find_buckets(units: Sequence[ParameterUnit], element: int, *, experts: bool) -> dict[int, int]:
    """Return the bucket of each tensor, in backward order, named by the index of its first tensor."""
    places, place = [], 0
    for number, unit in enumerate(units):
        for parameter in unit.parameters:
            if is_expert_unit(unit) == experts:
                ends = 0 if parameter.name.startswith(("final_norm", "head")) else 2 if unit.name == "root" else 1
                places.append((ends, -number, -place, parameter.numel * element))
            place += 1
    found: dict[int, int] = {}
    bucket, filled = -1, 0
    for _, _, negative, size in sorted(places):
        if filled == 0:
            bucket = -negative
        found[-negative] = bucket
        filled = 0 if filled + size >= BUCKET_BYTES else filled + size
    return found
