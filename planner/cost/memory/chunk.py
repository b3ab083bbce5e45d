"""The memory effect of one action of the schedule, combined from the pieces of a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from planner.cost.memory.autograd import GradientSum, Segment
from planner.cost.memory.pieces import RecordedPiece, record_embedding, record_head, record_layer
from planner.cost.memory.tape import BUFFERS, EMPTY, Stretch, join
from planner.cost.memory.zero import NO_UNIT, Sharding, ZeroUnit, change
from planner.cost.resolved_plan import MicroBatch
from planner.facts.stages import BUCKET_BYTES

Runs = tuple[tuple[bool, int], ...]


class Turn(NamedTuple):
    """The place of an action among those of its chunk in the step.

    The first backward finds no gradients, and the update follows the last one. `frees` is that of an `ActionType`.
    """

    first: bool
    last: bool
    frees: bool = False


class ChunkParameters(NamedTuple):
    """The parameters of a chunk.

    Attributes:
        runs: (has experts, number) of consecutive layers of one kind.
        first: the chunk has the embedding.
        last: the chunk has the head.
        dense: the unit of a layer without experts.
        moe: the unit of a layer with experts.
        root: the unit of everything outside the layers.
    """

    runs: Runs
    first: bool
    last: bool
    dense: ZeroUnit
    moe: ZeroUnit
    root: ZeroUnit

    @property
    def alone(self) -> int:
        """Elements of experts that no other rank holds."""
        return sum(self.moe.alone * count for moe, count in self.runs if moe)

    def get_unit(self, moe: bool) -> ZeroUnit:
        return self.moe if moe else self.dense

    def count_elements(self, *, shard: bool = False) -> int:
        """Return the elements of the parameters, or of one rank's shards."""
        units = [*((self.get_unit(moe), count) for moe, count in self.runs), (self.root, 1)]
        return sum(((unit.shard if shard else unit.numel) + unit.alone) * count for unit, count in units)


class Chunk(NamedTuple):
    """The facts that decide the memory of a chunk.

    Attributes:
        master: gradients accumulate in fp32, and weights have another type.
        sent: bytes per element of the bucket copies after the last backward.
        waits: weight gradients have their own actions.
        left: gathered weights are freed after the last forward and regathered for the first backward.
    """

    batch: MicroBatch
    parameters: ChunkParameters
    sharding: Sharding
    master: bool
    sent: int
    waits: bool
    left: bool

    @property
    def tied(self) -> bool:
        """Whether embedding and head share one table in this chunk."""
        return self.parameters.first and self.parameters.last and self.batch.model.tied_embeddings


def record_action(chunk: Chunk, kind: str, turn: Turn) -> Stretch:
    """Return the effect of a forward (F), a backward (B), or a backward of weights (W)."""
    pieces = _get_pieces(chunk, _get_sums(chunk, turn))
    return join(_RECORDERS[kind](_Action(chunk, turn, pieces)))


Layers = tuple[tuple[RecordedPiece, ZeroUnit, int], ...]  # (piece, unit, number in a row)


class _Pieces(NamedTuple):
    """The pieces of a chunk: its layers in order, and its ends."""

    layers: Layers
    embedding: RecordedPiece | None
    head: RecordedPiece | None


class _Action(NamedTuple):
    """A chunk with its pieces at its turn in the step."""

    chunk: Chunk
    turn: Turn
    pieces: _Pieces


@lru_cache(maxsize=64)  # the actions of a chunk follow each other
def _get_pieces(chunk: Chunk, sums: tuple[GradientSum, GradientSum]) -> _Pieces:
    """Return the pieces of a chunk. `sums`: how the gradients of layers and of experts add up."""
    batch, waits, parameters = chunk.batch, chunk.waits, chunk.parameters
    runs = _split_runs(parameters.runs)
    # The input of the first layer and the gradient of the last one may be messages, which the pipeline holds.
    layers = tuple(
        (
            record_layer(
                batch,
                sums[0],
                moe=moe,
                waits=waits,
                experts=sums[1],
                input_held=place == 0 and not parameters.first,
                gradient_held=place == len(runs) - 1 and not parameters.last,
            ),
            parameters.get_unit(moe),
            count,
        )
        for place, (moe, count) in enumerate(runs)
    )
    embedding = record_embedding(batch, sums[0], tied=chunk.tied, waits=waits) if parameters.first else None
    head = record_head(batch, sums[0], tied=chunk.tied, waits=waits) if parameters.last else None
    return _Pieces(layers, embedding, head)


def _get_sums(chunk: Chunk, turn: Turn) -> tuple[GradientSum, GradientSum]:
    """Return how the gradients of layers and of experts add up."""
    z = chunk.sharding
    sums: GradientSum = "keep" if turn.first else "add"
    # FSDP2 does not handle the gradients of experts that no other rank holds.
    unsharded: GradientSum = ("first master" if turn.first else "master") if chunk.master else sums
    if z.stage >= 2 or z.widens:
        sums = "keep"
    elif not z.stage:
        sums = unsharded
    return sums, unsharded if chunk.parameters.moe.alone else sums


@cache
def _split_runs(runs: Runs) -> Runs:
    """Return (kind, number in a row), with the first and last layer of each run by itself."""
    found: list[tuple[bool, int]] = []
    for moe, count in runs:
        middle = [(moe, count - 2)] if count > 2 else []
        found += [(moe, 1), *middle, (moe, 1)] if count > 1 else [(moe, 1)]
    return tuple(found)


def _record_forward(action: _Action) -> Iterator[Stretch]:
    (chunk, turn, (layers, embedding, head)), z = action, action.chunk.sharding
    gathers, frees = z.frees_each or (z.stage > 0 and turn.first), z.frees_each
    before = NO_UNIT
    if gathers and chunk.parameters.root.numel:
        yield z.gather(chunk.parameters.root, before)
        before = chunk.parameters.root
    if embedding:
        yield embedding.forward
    for piece, unit, count in layers:
        each = []
        for own in unit.met if gathers else ():
            each.append(z.gather(own, before))
            before = own
        each += [piece.forward, *([z.free(unit)] if frees else [])]
        yield join(each).times(count)
    if head:
        yield head.forward
    if gathers:
        yield z.drop_buffer(before)
    if frees:
        yield z.free(chunk.parameters.root)
    if head:
        yield head.loss
    if chunk.left and turn.last:
        yield from (z.free(unit).times(count) for _, unit, count in layers)
        yield z.free(chunk.parameters.root)


def _record_backward(action: _Action) -> Iterator[Stretch]:
    (chunk, turn, (layers, embedding, head)), z = action, action.chunk.sharding
    gathers = z.frees_each or (chunk.left and turn.first)
    frees = z.frees_each or (z.stage > 0 and turn.frees)
    reducer, buckets = _Reducer(chunk, turn), _Buckets(chunk.sent if turn.last and not chunk.waits else 0)
    embedded = chunk.batch.embedding_elements if embedding else 0
    ahead, gathered = NO_UNIT, False
    if head:
        yield head.loss_backward
    if gathers and chunk.parameters.root.numel:
        ahead = layers[-1][1].met[0]
        if not head:  # the last layer's output is the root's too, and the layer's hook comes first
            gathered = True
            yield z.gather_ahead(ahead).then(z.copy_out(ahead))
            ahead = _get_next_unit(layers, len(layers) - 1, 0)
            yield z.gather_ahead(ahead)
        yield z.gather_ahead(chunk.parameters.root).then(z.copy_out(chunk.parameters.root))
        if head:
            yield z.gather_ahead(ahead)
    if head:
        yield head.backward
        yield buckets.add(chunk.parameters.root.numel - embedded)
    for index in reversed(range(len(layers))):
        piece, unit, count = layers[index]
        each = []
        for place, own in enumerate(unit.met if gathers else ()):
            if gathered:
                gathered = False
                continue
            each += [z.copy_out(own)] if ahead.numel else [z.gather_ahead(own), z.copy_out(own)]
            ahead = _get_next_unit(layers, index, place)
            each.append(z.gather_ahead(ahead))
        for own, own_backward in _split_by_unit(piece, unit):
            each += [own_backward, *([z.free(own)] if frees else []), *reducer.after(own)]
        if buckets.element:
            yield from buckets.after(piece.segments, unit, count)
        else:
            yield join(each).times(count)
    if embedding and buckets.element:
        yield from buckets.after(embedding.segments, NO_UNIT._replace(numel=embedded), 1)
    elif embedding:
        yield embedding.backward
    if frees:
        yield z.free(chunk.parameters.root)
    if chunk.parameters.root.numel:
        yield from reducer.after(chunk.parameters.root)
    yield from reducer.end()
    yield buckets.rest()


def _get_next_unit(layers: Layers, index: int, place: int) -> ZeroUnit:
    """Return the unit that backward uses after the unit at `place` of a layer."""
    units = [unit.met for _, unit, _ in layers]
    if place + 1 < len(units[index]):
        return units[index][place + 1]
    return units[index - 1][0] if index else NO_UNIT


def _split_by_unit(piece: RecordedPiece, unit: ZeroUnit) -> list[tuple[ZeroUnit, Stretch]]:
    """Split the backward of a layer at the end of each unit: experts first, then the rest."""
    weights = [place for place, segment in enumerate(piece.segments) if segment.grouped]
    if not (unit.apart and weights):
        return [(unit, piece.backward)]
    tapes = [segment.tape for segment in piece.segments]
    experts, rest = unit.apart
    return [(experts, join(tapes[: weights[-1] + 1])), (rest, join(tapes[weights[-1] + 1 :]))]


def _record_weights(action: _Action) -> Iterator[Stretch]:
    """Yield the stretches of a backward of weights: all gradients first, then their sums and reductions."""
    chunk, turn, (layers, embedding, head) = action
    pieces = [(head, 1)] if head else []
    pieces += [(piece, count) for piece, _, count in reversed(layers)]
    pieces += [(embedding, 1)] if embedding else []
    yield from (piece.weights.times(count) for piece, count in pieces)
    yield from (piece.accumulation.times(count) for piece, count in pieces)
    if chunk.sharding.stage >= 2 or chunk.sharding.widens or (chunk.sharding.stage == 1 and turn.last):
        # Then the units are reduced in module order, the root first.
        reducer = _Reducer(
            chunk._replace(waits=False), turn, last=chunk.parameters.get_unit(chunk.parameters.runs[-1][0]).each[0]
        )
        frees = turn.frees and chunk.sharding.stage < 3
        for unit, count in [(chunk.parameters.root, 1), *((unit, count) for _, unit, count in layers)]:
            each = []
            for own in reversed(unit.each) if unit.numel else []:
                each += [*([chunk.sharding.free(own)] if frees else []), *reducer.after(own)]
            yield join(each).times(count)
        yield from reducer.end()
    if turn.last:
        alone = sum(unit.alone * count for _, unit, count in layers)
        yield change(BUFFERS, (chunk.parameters.count_elements() - alone) * chunk.sent)


class _Buckets:
    """The bucket copies of gradients in data parallelism without ZeRO, with `element` bytes per gradient element."""

    def __init__(self, element: int) -> None:
        self.element, self._waiting = element, 0

    def add(self, numel: int) -> Stretch:
        self._waiting += numel * self.element
        return self.rest() if self._waiting >= BUCKET_BYTES else EMPTY

    def after(self, segments: Sequence[Segment], unit: ZeroUnit, count: int) -> Iterator[Stretch]:
        """Yield `count` backwards of a layer and the buckets that its gradients fill.

        Experts that no other rank holds are not sent. Gradients of norms and biases come last.
        """
        weights = [0 if unit.alone and segment.grouped else segment.weight for segment in segments]
        for _ in range(count):
            for segment, weight in zip(segments, weights, strict=True):
                yield segment.tape.then(self.add(weight))
            yield self.add(unit.numel - sum(weights))

    def rest(self) -> Stretch:
        """Return the copy of the last, partly filled bucket."""
        left, self._waiting = self._waiting, 0
        return change(BUFFERS, left)


class _Reducer:
    """The reduce-scatters after the backward of each unit under ZeRO.

    `last` is the unit that a micro-batch reduces last. By default it is the root, or the first layer without a root.
    """

    def __init__(self, chunk: Chunk, turn: Turn, last: ZeroUnit | None = None) -> None:
        self._turn, self._z = turn, chunk.sharding
        z = self._z
        self._reduces = not chunk.waits and (z.stage >= 2 or (z.stage == 1 and turn.last))
        # Gradients of several micro-batches accumulate in the type of the reduction.
        self._widens = not chunk.waits and z.widens and not (turn.first and turn.last)
        parameters = chunk.parameters
        usual = parameters.root if parameters.root.numel else parameters.get_unit(parameters.runs[0][0]).each[-1]
        self._before = (last or usual) if not turn.first and z.stage >= 2 else NO_UNIT

    def after(self, unit: ZeroUnit) -> list[Stretch]:
        z, found = self._z, list[Stretch]()
        if self._widens:
            found.append(z.widen(unit, first=self._turn.first))
        if self._reduces:
            first = self._turn.first or z.stage == 1
            element = z.reduced if self._widens else z.compute
            found.append(z.reduce(unit, self._before, first=first, element=element))
            self._before = unit
        return found

    def end(self) -> list[Stretch]:
        """Free the last buffer, which stays until the next micro-batch except after the last one."""
        if self._reduces and self._turn.last:
            return [self._z.drop_reduced(self._before)]
        return []


_RECORDERS = {"F": _record_forward, "B": _record_backward, "W": _record_weights}
