"""What Megatron with Transformer Engine keeps, in closed form: nothing of ours allocates so, and no dry run shows it.

Reducing Activation Recomputation (2205.05198, section 4) counts the tensors of a layer; Transformer Engine keeps the
same, and no scores where its attention is fused. Figures are of the moment at which the first backward begins: as
many micro-batches are in flight as the schedule allows, and the last stage has the logits of one. Megatron-LM's own
tests publish such peaks (`python -m benchmarks.published`).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.cost.memory.chunk import Chunk
from planner.cost.memory.shape import Shape, shape_of
from planner.cost.memory.stage import Fullest, rank_of_stage
from planner.cost.memory.tape import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    WORKING,
    Levels,
)
from planner.cost.pipes import chunks_in_flight
from planner.facts.model_shapes import count_expert_rows
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP8_BYTES, FP32_BYTES, get_mixed_precision
from planner.facts.spec import JobSpec

WHEN = "when the first backward begins"
MASK_BYTES = 1  # of a dropout, an element
SOFTMAX_BYTES, DROPPED_BYTES = 2, 3  # of unfused attention: a score's softmax; with dropout its copy and the mask
FP8_COPIES = 2  # of a weight, which stay beside it: for forward, and transposed for backward (TE's module/base.py)
LOGIT_BYTES = 6  # of one logit: as it came, and in fp32, where softmax and its gradient take its place


def fullest(spec: JobSpec, stage: int) -> Fullest:
    """Levels by part on a rank of the stage."""
    return Fullest(_levels(spec, stage), WHEN)


def most_bytes(spec: JobSpec, stages: tuple[int, ...]) -> int:
    """The sum of `fullest` on the fullest of `stages`, which hold alike: earlier ones keep more in flight."""
    return sum(_levels(spec, min(stages)))


def least_bytes(spec: JobSpec, stage: int) -> int:
    """What no choice of micro-batches or recompute can go below."""
    levels = _state(spec, stage)
    return sum(levels)


def gradient_bytes(spec: JobSpec, stage: int) -> int:
    """Of a step's gradients, which stand all the while."""
    return _state(spec, stage)[GRADIENTS]


def layer_bytes(spec: JobSpec, *, moe: bool) -> int:
    """What one layer keeps of a micro-batch."""
    return sum(_kept(shape_of(spec), moe=moe))


def saved_bytes(spec: JobSpec, *, moe: bool) -> int:
    """What one layer's operations save of a micro-batch: a tensor as often as one saves it, unfused scores by their
    softmax and by the product that takes them."""
    shape, kept = shape_of(spec), layer_bytes(spec, moe=moe)
    if shape.attention != "unfused":
        return kept
    heads = shape.model.num_heads // shape.tp
    times = 2 if shape.recompute == "selective" else 1  # one of them counts among what is kept otherwise
    return kept + times * shape.tokens * shape.seq_len * heads * SOFTMAX_BYTES


def _levels(spec: JobSpec, stage: int) -> Levels:
    found = _state(spec, stage)
    rank, layout = rank_of_stage(spec, stage), spec.layout
    shape, shares = rank.chunks[0].shape, len(rank.chunks)
    kinds = [(moe, count) for chunk in rank.chunks for moe, count in chunk.runs]
    kept = sum(count * sum(_kept(shape, moe=moe)) for moe, count in kinds)
    flight = min(chunks_in_flight(layout, stage, spec.train.micro_batches), spec.train.micro_batches * shares)
    found[ACTIVATIONS] = kept * flight // shares
    again = shape._replace(recompute="none")
    working = max(_grads(shape, moe=moe) for moe, _ in kinds)
    if shape.recompute == "full":
        working += max(sum(_kept(again, moe=moe)) for moe, _ in kinds)
    if any(chunk.last for chunk in rank.chunks):
        found[LOGITS] = shape.tokens * shape.vocab_rows * LOGIT_BYTES
        found[ACTIVATIONS] += 2 * shape.part_bytes  # the final norm's input and output
        working = max(0, working - found[LOGITS])  # logits are gone before a layer's backward
    found[WORKING] = working
    return tuple(found)


def _state(spec: JobSpec, stage: int) -> list[int]:
    """Weights, gradients and moments from step to step (ZeRO 1910.02054 figure 1); and of each chunk but the first the
    input that it was sent last, with its gradient: nothing lets go of them before the next comes (Megatron-LM's
    transformer_block.py, `set_input_tensor`)."""
    rank, layout, mix = rank_of_stage(spec, stage), spec.layout, get_mixed_precision(spec.train.precision)
    whole = sum(chunk.elements() for chunk in rank.chunks)
    shard = sum(chunk.elements(shard=True) for chunk in rank.chunks) if layout.zero else whole
    found = list(NOTHING)
    found[PARAMETERS] = (shard if layout.zero == 3 else whole) * mix.compute_bytes
    found[GRADIENTS] = (shard if layout.zero >= 2 else whole) * mix.gradient_bytes
    found[OPTIMIZER] = shard * mix.optimizer_bytes
    if spec.train.precision == "fp8":
        found[PARAMETERS] += FP8_COPIES * FP8_BYTES * sum(_narrow_elements(chunk) for chunk in rank.chunks)
    found[BUFFERS] = 2 * rank.message * sum(not chunk.first for chunk in rank.chunks)
    if layout.keep_gathered:
        found[GATHERED] = max(chunk.elements() for chunk in rank.chunks) * mix.compute_bytes
    elif layout.zero == 3:  # a layer in use, and the next; all else to a step's end (megatron_fsdp.py, `_post_forward`)
        layers = 2 * max(unit.numel for c in rank.chunks for unit in (c.dense, c.moe))
        found[GATHERED] = (layers + sum(chunk.root.numel for chunk in rank.chunks)) * mix.compute_bytes
    return found


def _narrow_elements(chunk: Chunk) -> int:
    """Of weights whose products run in fp8: all but the tables and norms of the ends."""
    return chunk.elements() - chunk.root.numel


def _kept(s: Shape, *, moe: bool) -> Iterator[int]:
    """Bytes that a layer keeps of one micro-batch, tensor by tensor."""
    yield s.part_bytes  # the residual stream, which the first norm takes
    if s.recompute == "full":
        return
    light, width = s.light, s.narrow / s.element
    gpt, mask = s.model.arch == "gpt", s.part_bytes // s.element * MASK_BYTES if s.dropout else 0
    if not light:
        yield round(s.part_bytes * width)  # normed, as the product takes it
    yield from _attended(s)
    yield s.part_bytes  # the second norm's input
    yield 2 * mask
    if not light:
        yield round(s.part_bytes * width)
    wide = s.tokens * s.element // s.tp
    if not moe:
        yield from _between(wide * s.model.ffn_hidden_size, gated=not gpt, width=width, light=light)
        return
    mixture = s.model.moe
    assert mixture is not None
    routed = count_expert_rows(mixture, s.tokens, s.seq_len) * s.element
    inner = mixture.expert_ffn_hidden_size // s.tp
    yield s.tokens * mixture.num_experts * FP32_BYTES  # probabilities
    yield round(routed * s.model.hidden_size * width)
    yield from _between(routed * inner, gated=True, width=width, light=light)
    shared = wide * mixture.expert_ffn_hidden_size * mixture.shared_experts
    yield from _between(shared, gated=True, width=width, light=light)


def _between(wide: int, *, gated: bool, width: float, light: bool) -> Iterator[int]:
    """The two products of an MLP: what the first gives, and the second takes."""
    yield wide * (2 if gated else 1)
    if not light:
        yield round(wide * width)


def _attended(s: Shape) -> Iterator[int]:
    model, row = s.model, s.tokens * s.element
    heads, width = model.num_heads // s.tp, s.narrow / s.element
    if mla := model.mla:
        yield row * (2 * (mla.q_rank + mla.kv_rank) + mla.rope_head_dim)
        inside = mla.nope_head_dim + mla.rope_head_dim
        queries, values = row * heads * inside, row * heads * mla.value_head_dim
        keys = queries
    else:
        queries = values = row * heads * model.head_size
        keys = row * count_local_kv_heads(model.num_kv_heads, s.tp) * model.head_size
        values = keys
    out = row * heads * (mla.value_head_dim if mla else model.head_size)
    if s.attention == "unfused":
        yield queries + keys + values
        if s.recompute != "selective":
            yield s.tokens * s.seq_len * heads * (SOFTMAX_BYTES + (DROPPED_BYTES if s.dropout else 0))
    else:
        yield queries + keys + values + s.tokens * heads * FP32_BYTES
    yield out
    if s.narrow != s.element:
        yield round(out * width)  # again, as the product takes it


def _grads(s: Shape, *, moe: bool) -> int:
    """What a layer's backward needs at once: the gradients of an MLP's middle, and its input gathered again."""
    mixture, rows = s.model.moe, s.tokens
    inner = s.model.ffn_hidden_size
    if moe and mixture is not None:
        rows, inner = count_expert_rows(mixture, s.tokens, s.seq_len), mixture.expert_ffn_hidden_size
    gated = s.model.arch != "gpt"
    return rows * s.element * (inner * (3 if gated else 2) // s.tp + s.model.hidden_size)
