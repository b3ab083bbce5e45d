"""What Megatron with Transformer Engine keeps, in closed form: nothing of ours allocates so, and no dry run shows it.

Reducing Activation Recomputation (2205.05198, section 4) counts the tensors of a layer; Transformer Engine keeps the
same, and no scores where its attention is fused. Figures are of the moment at which the first backward begins: as
many micro-batches are in flight as the schedule allows, and the last stage has the logits of one. Megatron-LM's own
tests publish such peaks (`python -m benchmarks.published`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.cost.memory.chunk import Chunk
from planner.cost.memory.rank import Peak, StageMemory
from planner.cost.memory.shape import Shape, get_shape
from planner.cost.memory.tape import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    PARTS,
    WORKING,
    Levels,
)
from planner.cost.pipeline_simulation import chunks_in_flight
from planner.cost.resolved_plan import ResolvedPlan
from planner.facts.model_shapes import count_expert_rows
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP8_BYTES, FP32_BYTES

WHEN = "when the first backward begins"
MASK_BYTES = 1  # of a dropout, an element
SOFTMAX_BYTES, DROPPED_BYTES = 2, 3  # of unfused attention: a score's softmax; with dropout its copy and the mask
FP8_COPIES = 2  # of a weight, which stay beside it: for forward, and transposed for backward (TE's module/base.py)
LOGIT_BYTES = 6  # of one logit: as it came, and in fp32, where softmax and its gradient take its place


class MegatronMemory(StageMemory):
    """The memory of each pipeline stage of a plan that runs on Megatron."""

    def find_peak(self, stage: int) -> Peak:
        return Peak(self._get_levels(stage), WHEN)

    def max_bytes(self, stages: tuple[int, ...], limit: int | None = None) -> int:
        return sum(self._get_levels(min(stages)))  # earlier stages keep more micro-batches in flight

    def min_bytes(self, stage: int) -> int:
        return sum(self._get_state(stage))

    def gradient_bytes(self, stage: int) -> int:
        return self._get_state(stage)[GRADIENTS]

    def layer_bytes(self, *, moe: bool = False) -> int:
        return sum(_kept(self.shape, moe=moe))

    def _get_levels(self, stage: int) -> Levels:
        found = self._get_state(stage)
        rank, layout = self.get_rank(stage), self.plan.layout
        shape, shares = self.shape, len(rank.chunks)
        kinds = [(moe, count) for chunk in rank.chunks for moe, count in chunk.runs]
        kept = sum(count * sum(_kept(shape, moe=moe)) for moe, count in kinds)
        flight = min(
            chunks_in_flight(layout, stage, self.plan.train.micro_batches), self.plan.train.micro_batches * shares
        )
        found[ACTIVATIONS] = kept * flight // shares
        again = replace(shape, recompute="none")
        working = max(_grads(shape, moe=moe) for moe, _ in kinds)
        if shape.recompute == "full":
            working += max(sum(_kept(again, moe=moe)) for moe, _ in kinds)
        if any(chunk.last for chunk in rank.chunks):
            found[LOGITS] = shape.tokens * shape.vocab_rows * LOGIT_BYTES
            found[ACTIVATIONS] += 2 * shape.part_bytes  # the final norm's input and output
            working = max(0, working - found[LOGITS])  # logits are gone before a layer's backward
        found[WORKING] = working
        return tuple(found)

    def _get_state(self, stage: int) -> list[int]:
        """Return the levels of weights, gradients, and optimizer (ZeRO 1910.02054 figure 1).

        Each chunk but the first also keeps its last input and the gradient of that input until the next input arrives
        (`set_input_tensor` in Megatron-LM's transformer_block.py).
        """
        rank, layout, mix = self.get_rank(stage), self.plan.layout, self.plan.mix
        whole = sum(chunk.count_elements() for chunk in rank.chunks)
        shard = sum(chunk.count_elements(shard=True) for chunk in rank.chunks) if layout.zero else whole
        found = [0] * len(PARTS)
        found[PARAMETERS] = (shard if layout.zero == 3 else whole) * mix.compute_bytes
        found[GRADIENTS] = (shard if layout.zero >= 2 else whole) * mix.gradient_bytes
        found[OPTIMIZER] = shard * mix.optimizer_bytes
        if self.plan.train.precision == "fp8":
            found[PARAMETERS] += FP8_COPIES * FP8_BYTES * sum(_narrow_elements(chunk) for chunk in rank.chunks)
        found[BUFFERS] = 2 * rank.message * sum(not chunk.first for chunk in rank.chunks)
        if layout.keep_gathered:
            found[GATHERED] = max(chunk.count_elements() for chunk in rank.chunks) * mix.compute_bytes
        elif (
            layout.zero == 3
        ):  # a layer in use, and the next; all else to a step's end (megatron_fsdp.py, `_post_forward`)
            layers = 2 * max(unit.numel for c in rank.chunks for unit in (c.dense, c.moe))
            found[GATHERED] = (layers + sum(chunk.root.numel for chunk in rank.chunks)) * mix.compute_bytes
        return found


def saved_bytes(plan: ResolvedPlan, *, moe: bool) -> int:
    """Return the bytes that the operations of one layer save of a micro-batch.

    A tensor counts once per operation that saves it. Unfused scores are saved by softmax and by the next matmul.
    """
    shape = get_shape(plan.micro_batch)
    kept = sum(_kept(shape, moe=moe))
    if shape.attention != "unfused":
        return kept
    heads = shape.model.num_heads // shape.tp
    times = 2 if shape.recompute == "selective" else 1  # one of them is part of `kept` otherwise
    return kept + times * shape.tokens * shape.seq_len * heads * SOFTMAX_BYTES


def _narrow_elements(chunk: Chunk) -> int:
    """Of weights whose products run in fp8: all but the tables and norms of the ends."""
    return chunk.count_elements() - chunk.root.numel


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
