"""Where each tensor lies: what expert, tensor and data parallelism each leave a rank of it.

The trainer, checkpoints, memory and traffic all read it. It says nothing of what is sent: that the trainer decides and
the planner predicts, each by itself, so that comparing them can show a fault of either.

Where the part of a tensor that a rank holds lies in the whole tensor: what a checkpoint needs to know.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from planner.facts.layout import Coordinates, shard_group
from planner.facts.model_shapes import Parameter, is_key_or_value, is_vocabulary
from planner.facts.spec import JobSpec, Layout, ModelSpec

Shape = tuple[int, ...]
# A vocabulary that tp does not divide is padded to a multiple of this times tp (Megatron-LM's
# --make-vocab-size-divisible-by).
VOCABULARY_MULTIPLE = 128
# Padding beyond this share of a tensor costs more than the copies that shards of another dim than 0 need.
MOST_PADDING = 1 / 64


class Shard(NamedTuple):
    """A dim cut into `parts` of `rows` each, as torch.chunk cuts: the last ones may be short or empty.

    `copies` neighbours hold the same part. What a short part of tp lacks is held all the same, as rows of zeros.
    """

    dim: int
    parts: int
    rows: int
    copies: int = 1

    def held(self, size: int, index: int) -> range:
        """What of a dim of `size` the rank `index` of the axis holds."""
        start = index // self.copies * self.rows
        return range(min(start, size), min(start + self.rows, size))


class Placement(NamedTuple):
    """How each axis divides a tensor, each what the one before it left; None where all its ranks hold the same."""

    ep: Shard | None
    tp: Shard | None
    zero: Shard | None

    @property
    def parts(self) -> int:
        """Different parts of the tensor that ranks hold."""
        total = 1
        for shard in self:
            total *= shard.parts if shard else 1
        return total


def placement(model: ModelSpec, layout: Layout, parameter: Parameter) -> Placement:
    """Of a tensor of the whole model."""
    ep, tp = _divided(parameter, model.num_kv_heads, layout.tp, layout.ep)
    if not layout.zero:
        return Placement(ep, tp, None)
    degree = shard_group(layout, experts=ep is not None).size
    return Placement(ep, tp, zero_shard(local_parameter(model, layout, parameter).shape, degree))


def local_parameter(model: ModelSpec, layout: Layout, parameter: Parameter) -> Parameter:
    """A tensor with the shape that ep and tp leave a rank, as data parallelism meets it."""
    return local_shape(parameter, model.num_kv_heads, layout.tp, layout.ep)


@cache
def local_shape(parameter: Parameter, num_kv_heads: int, tp: int, ep: int) -> Parameter:
    """`local_parameter`, of the numbers that it depends on."""
    shape = list(parameter.shape)
    for shard in _divided(parameter, num_kv_heads, tp, ep):
        if shard:
            shape[shard.dim] = shard.rows
    return parameter._replace(shape=tuple(shape))


def places(layout: Layout, place: Coordinates, parameter: Parameter) -> tuple[int, int, int]:
    """A rank's index among those that ep, tp and ZeRO divide a tensor over."""
    ep = layout.ep if parameter.is_expert else 1
    experts = expert_index(layout, place) if parameter.is_expert else 0
    shard = (place.dp * layout.cp + place.cp) // ep
    return experts, place.tp, shard % shard_group(layout, experts=parameter.is_expert).size


def expert_index(layout: Layout, place: Coordinates) -> int:
    """A rank's index among those that ep divides experts over."""
    return (place.dp * layout.cp + place.cp) % layout.ep


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding, and of the head, over all tp ranks: beyond `vocab_size` they stay zero and count nothing.

    GPT-3's 50,257 on tp 8: 51,200. A size that tp divides stays as it is.
    """
    if vocab_size % tp == 0:
        return vocab_size
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def vocab_rows(spec: JobSpec) -> int:
    """Of them, those of one rank."""
    return padded_vocab(spec.model.vocab_size, spec.layout.tp) // spec.layout.tp


def shared_heads(num_kv_heads: int, tp: int) -> int:
    """tp ranks that hold the same key/value heads: several where there are more ranks than heads."""
    return max(1, tp // num_kv_heads)


def kv_heads_held(num_kv_heads: int, tp: int) -> int:
    """Key/value heads of one tp rank."""
    return num_kv_heads * shared_heads(num_kv_heads, tp) // tp


def zero_shard(shape: Shape, degree: int) -> Shard | None:
    """How ZeRO divides what ep and tp leave of a tensor over `degree` ranks.

    Dim 0, whose rows lie side by side. FSDP2 pads that to a multiple of the degree, which would make 8 stacked experts
    64 over 64 ranks: beyond `MOST_PADDING` the first dim that divides evenly is cut, if there is one.
    """
    if degree == 1:
        return None
    rows = -(-shape[0] // degree)
    if rows * degree > shape[0] * (1 + MOST_PADDING):
        for dim, size in enumerate(shape):
            if size % degree == 0:
                return Shard(dim, degree, size // degree)
    return Shard(0, degree, rows)


def gathered_numel(local: Parameter, degree: int) -> int:
    """Elements of a tensor as ZeRO gathers and reduces it, padded to `degree` full shards."""
    shard = zero_shard(local.shape, degree)
    return local.numel if shard is None else local.numel // local.shape[shard.dim] * shard.rows * degree


def shard_numel(local: Parameter, degree: int, index: int = 0) -> int:
    """Elements of a tensor that the shard `index` of `degree` holds, without padding; the first is the largest."""
    shard = zero_shard(local.shape, degree)
    if shard is None:
        return local.numel
    size = local.shape[shard.dim]
    return local.numel // size * len(shard.held(size, index))


@cache
def _divided(parameter: Parameter, num_kv_heads: int, tp: int, ep: int) -> tuple[Shard | None, Shard | None]:
    """By ep and by tp."""
    experts = Shard(0, ep, parameter.shape[0] // ep) if parameter.is_expert and ep > 1 else None
    if parameter.tp_dim is None or tp == 1:
        return experts, None
    copies = shared_heads(num_kv_heads, tp) if is_key_or_value(parameter) else 1
    size, parts = parameter.shape[parameter.tp_dim], tp // copies
    whole = padded_vocab(size, tp) if is_vocabulary(parameter) else size
    return experts, Shard(parameter.tp_dim, parts, whole // parts, copies)


class Box(NamedTuple):
    """Offset and size by dim, in the whole tensor. Padding of the vocabulary lies in no box."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def filled(self) -> tuple[slice, ...]:
        """Where the box lies in the rank's own tensor, whose padding comes last."""
        return tuple(slice(size) for size in self.sizes)


def divided_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> Box:
    """What tp and ep leave to a rank, before ZeRO. Ranks that share key/value heads have the same."""
    return _box(spec, place, parameter, placement(spec.model, spec.layout, parameter)._replace(zero=None))


def held_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> Box:
    """What a rank keeps between steps: ZeRO leaves it a part of what tp and ep do. May be empty."""
    return _box(spec, place, parameter, placement(spec.model, spec.layout, parameter))


def _box(spec: JobSpec, place: Coordinates, parameter: Parameter, placed: Placement) -> Box:
    offsets, sizes = [0] * len(parameter.shape), list(parameter.shape)
    for shard, index in zip(placed, places(spec.layout, place, parameter), strict=True):
        if shard:
            held = shard.held(sizes[shard.dim], index)
            offsets[shard.dim] += held.start
            sizes[shard.dim] = len(held)
    return Box(tuple(offsets), tuple(sizes))
