"""Compute the shard of each tensor that a rank has after ep, tp, and ZeRO.

The trainer, checkpoints, memory, and traffic use these placements. They do not include what ranks send.
The trainer and the planner decide that independently, so their comparison can show an error in either.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from planner.facts.layout import Coordinates, get_shard_group
from planner.facts.model_shapes import Parameter, is_key_or_value, is_vocabulary
from planner.facts.spec import JobSpec, Layout, ModelSpec

Shape = tuple[int, ...]
# tp pads a vocabulary that it does not divide to a multiple of this number times tp (Megatron-LM's
# --make-vocab-size-divisible-by).
VOCABULARY_MULTIPLE = 128
# More padding than this fraction of a tensor costs more than the copies of shards along another dim than 0.
MAX_PADDING_FRACTION = 1 / 64


class Shard(NamedTuple):
    """Split of one dim into `num_shards` shards of `rows` rows, as torch.chunk splits.

    The last shards can be short or empty. Short tp shards are padded with rows of zeros.
    `replicas` neighboring ranks have the same shard.
    """

    dim: int
    num_shards: int
    rows: int
    replicas: int = 1

    def get_range(self, size: int, index: int) -> range:
        """Return the rows of a dim of `size` that rank `index` of the axis has."""
        start = index // self.replicas * self.rows
        return range(min(start, size), min(start + self.rows, size))


class TensorPlacement(NamedTuple):
    """Shard of a tensor per axis, each applied after the previous axis. None replicates."""

    ep: Shard | None
    tp: Shard | None
    zero: Shard | None

    @property
    def num_shards(self) -> int:
        """Return the number of different shards of the tensor."""
        total = 1
        for shard in self:
            total *= shard.num_shards if shard else 1
        return total


def get_placement(model: ModelSpec, layout: Layout, parameter: Parameter) -> TensorPlacement:
    """Return the placement of a tensor of the whole model."""
    ep, tp = _get_ep_tp_shards(parameter, model.num_kv_heads, layout.tp, layout.ep)
    if not layout.zero:
        return TensorPlacement(ep, tp, None)
    degree = get_shard_group(layout, experts=ep is not None).size
    return TensorPlacement(ep, tp, get_zero_shard(get_local_parameter(model, layout, parameter).shape, degree))


def get_local_parameter(model: ModelSpec, layout: Layout, parameter: Parameter) -> Parameter:
    """Return a tensor with the shape that ep and tp leave on a rank, before ZeRO."""
    return compute_local_parameter(parameter, model.num_kv_heads, layout.tp, layout.ep)


@cache
def compute_local_parameter(parameter: Parameter, num_kv_heads: int, tp: int, ep: int) -> Parameter:
    """Return `get_local_parameter` from the numbers that it depends on."""
    shape = list(parameter.shape)
    for shard in _get_ep_tp_shards(parameter, num_kv_heads, tp, ep):
        if shard:
            shape[shard.dim] = shard.rows
    return parameter._replace(shape=tuple(shape))


def get_shard_indices(layout: Layout, place: Coordinates, parameter: Parameter) -> tuple[int, int, int]:
    """Return the index of a rank among the ep, tp, and ZeRO shards of a tensor."""
    ep = layout.ep if parameter.is_expert else 1
    experts = get_expert_index(layout, place) if parameter.is_expert else 0
    shard = (place.dp * layout.cp + place.cp) // ep
    return experts, place.tp, shard % get_shard_group(layout, experts=parameter.is_expert).size


def get_expert_index(layout: Layout, place: Coordinates) -> int:
    """Return the index of a rank among the ranks that ep shards experts over."""
    return (place.dp * layout.cp + place.cp) % layout.ep


def get_padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the rows of embedding and head over all tp ranks.

    Rows beyond `vocab_size` stay zero. GPT-3's 50,257 rows become 51,200 with tp 8.
    A size that tp divides is unchanged.
    """
    if vocab_size % tp == 0:
        return vocab_size
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def get_vocab_rows(spec: JobSpec) -> int:
    """Return the rows of the padded vocabulary on one rank."""
    return get_padded_vocab_size(spec.model.vocab_size, spec.layout.tp) // spec.layout.tp


def count_kv_replicas(num_kv_heads: int, tp: int) -> int:
    """Return the number of tp ranks that have a replica of each key/value head."""
    return max(1, tp // num_kv_heads)


def count_local_kv_heads(num_kv_heads: int, tp: int) -> int:
    """Return the number of key/value heads on one tp rank."""
    return num_kv_heads * count_kv_replicas(num_kv_heads, tp) // tp


def get_zero_shard(shape: Shape, degree: int) -> Shard | None:
    """Return how ZeRO shards a tensor over `degree` ranks after ep and tp.

    ZeRO shards dim 0, whose rows are contiguous. FSDP2 pads dim 0 to a multiple of the degree, which would pad
    8 stacked experts to 64 rows over 64 ranks. If the padding exceeds `MAX_PADDING_FRACTION`, ZeRO shards the first
    dim that divides evenly, if any.
    """
    if degree == 1:
        return None
    rows = -(-shape[0] // degree)
    if rows * degree > shape[0] * (1 + MAX_PADDING_FRACTION):
        for dim, size in enumerate(shape):
            if size % degree == 0:
                return Shard(dim, degree, size // degree)
    return Shard(0, degree, rows)


def compute_gathered_numel(local: Parameter, degree: int) -> int:
    """Return the elements of a tensor that ZeRO gathers and reduces, with padding."""
    shard = get_zero_shard(local.shape, degree)
    return local.numel if shard is None else local.numel // local.shape[shard.dim] * shard.rows * degree


def compute_shard_numel(local: Parameter, degree: int, index: int = 0) -> int:
    """Return the elements of a shard without padding. Shard 0 is the largest."""
    shard = get_zero_shard(local.shape, degree)
    if shard is None:
        return local.numel
    size = local.shape[shard.dim]
    return local.numel // size * len(shard.get_range(size, index))


@cache
def _get_ep_tp_shards(parameter: Parameter, num_kv_heads: int, tp: int, ep: int) -> tuple[Shard | None, Shard | None]:
    """Return the shards of a tensor over ep and tp."""
    experts = Shard(0, ep, parameter.shape[0] // ep) if parameter.is_expert and ep > 1 else None
    if parameter.tp_dim is None or tp == 1:
        return experts, None
    copies = count_kv_replicas(num_kv_heads, tp) if is_key_or_value(parameter) else 1
    size, parts = parameter.shape[parameter.tp_dim], tp // copies
    whole = get_padded_vocab_size(size, tp) if is_vocabulary(parameter) else size
    return experts, Shard(parameter.tp_dim, parts, whole // parts, copies)


class TensorBox(NamedTuple):
    """Offset and size per dim in the whole tensor, as checkpoints need them.

    Padding of the vocabulary belongs to no box.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Return the slices of the box in the local tensor, whose padding is at the end."""
        return tuple(slice(size) for size in self.sizes)


def get_unsharded_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> TensorBox:
    """Return the box that tp and ep leave on a rank, before ZeRO.

    Ranks with replicas of a key/value head have equal boxes.
    """
    return _compute_box(spec, place, parameter, get_placement(spec.model, spec.layout, parameter)._replace(zero=None))


def get_local_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> TensorBox:
    """Return the box that a rank keeps after tp, ep, and ZeRO. It can be empty."""
    return _compute_box(spec, place, parameter, get_placement(spec.model, spec.layout, parameter))


def _compute_box(spec: JobSpec, place: Coordinates, parameter: Parameter, placed: TensorPlacement) -> TensorBox:
    offsets, sizes = [0] * len(parameter.shape), list(parameter.shape)
    for shard, index in zip(placed, get_shard_indices(spec.layout, place, parameter), strict=True):
        if shard:
            held = shard.get_range(sizes[shard.dim], index)
            offsets[shard.dim] += held.start
            sizes[shard.dim] = len(held)
    return TensorBox(tuple(offsets), tuple(sizes))
