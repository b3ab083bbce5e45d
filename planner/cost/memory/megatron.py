"""The memory of Megatron with Transformer Engine in closed form, because no dry run shows its allocations.

Reducing Activation Recomputation (2205.05198, section 4) counts the tensors of a layer. Transformer Engine saves the
same tensors, without scores if its attention is fused. The figures are those when the first backward begins: as many
micro-batches are in flight as the schedule allows, and the last stage has the logits of one. Megatron-LM's own tests
publish such peaks (`python -m benchmarks.published`).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from planner.cost.memory.rank import Peak, StageMemory
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
from planner.cost.pipeline_simulation import count_chunks_in_flight
from planner.cost.resolved_plan import MicroBatch, ResolvedPlan
from planner.facts.model_shapes import count_expert_rows
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP8_BYTES, FP32_BYTES

WHEN = "when the first backward begins"
MASK_BYTES = 1  # per element of a dropout
SOFTMAX_BYTES, DROPPED_BYTES = 2, 3  # per score of unfused attention: softmax, and with dropout its copy and the mask
FP8_COPIES = 2  # of a weight, in addition to it: for forward, and transposed for backward (TE's module/base.py)
LOGIT_BYTES = 6  # per logit: the output, and fp32 values, whose memory softmax and its gradient reuse


class MegatronMemory(StageMemory):
    """The memory of each pipeline stage of a plan that runs on Megatron."""

    def find_peak(self, stage: int) -> Peak:
        return Peak(self._get_levels(stage), WHEN)

    def get_max_bytes(self, stages: tuple[int, ...], limit: int | None = None) -> int:
        return sum(self._get_levels(min(stages)))  # earlier stages keep more micro-batches in flight

    def get_min_bytes(self, stage: int) -> int:
        return sum(self._get_state(stage))

    def get_gradient_bytes(self, stage: int) -> int:
        return self._get_state(stage)[GRADIENTS]

    def get_layer_bytes(self, *, moe: bool = False) -> int:
        return sum(_get_saved(self.batch, moe=moe))

    def _get_levels(self, stage: int) -> Levels:
        found, rank, batch, layout = self._get_state(stage), self.get_rank(stage), self.batch, self.plan.layout
        m, num_chunks = self.plan.train.micro_batches, len(rank.chunks)
        kinds = [(moe, count) for chunk in rank.chunks for moe, count in chunk.parameters.runs]
        saved = sum(count * sum(_get_saved(batch, moe=moe)) for moe, count in kinds)
        flight = min(count_chunks_in_flight(layout, stage, m), m * num_chunks)
        found[ACTIVATIONS] = saved * flight // num_chunks
        working = max(_count_gradients(batch, moe=moe) for moe, _ in kinds)
        if batch.recompute == "full":
            again = copy(batch)
            again.recompute = "none"
            working += max(sum(_get_saved(again, moe=moe)) for moe, _ in kinds)
        if any(chunk.parameters.last for chunk in rank.chunks):
            found[LOGITS] = batch.tokens * batch.vocab_rows * LOGIT_BYTES
            found[ACTIVATIONS] += 2 * batch.shard_bytes  # the final norm's input and output
            working = max(0, working - found[LOGITS])  # logits are freed before a layer's backward
        found[WORKING] = working
        return tuple(found)

    def _get_state(self, stage: int) -> list[int]:
        """Return the levels of weights, gradients, and optimizer (ZeRO 1910.02054 figure 1).

        Each chunk but the first also keeps its last input and the gradient of that input until the next input arrives
        (`set_input_tensor` in Megatron-LM's transformer_block.py).
        """
        rank, layout, mix = self.get_rank(stage), self.plan.layout, self.plan.mix
        chunks = [chunk.parameters for chunk in rank.chunks]
        whole = self.count_elements(stage)
        shard = self.count_elements(stage, shard=bool(layout.zero))
        found = [0] * len(PARTS)
        found[PARAMETERS] = (shard if layout.zero == 3 else whole) * mix.compute_bytes
        found[GRADIENTS] = (shard if layout.zero >= 2 else whole) * mix.gradient_bytes
        found[OPTIMIZER] = shard * mix.optimizer_bytes
        if self.plan.train.precision == "fp8":  # tables and norms at the ends stay in the compute type
            narrow = sum(chunk.count_elements() - chunk.root.numel for chunk in chunks)
            found[PARAMETERS] += FP8_COPIES * FP8_BYTES * narrow
        found[BUFFERS] = 2 * rank.message * sum(not chunk.first for chunk in chunks)
        if layout.keep_gathered:
            found[GATHERED] = max(chunk.count_elements() for chunk in chunks) * mix.compute_bytes
        elif layout.zero == 3:
            # A layer in use, and the next. The ends stay until the end of the step (megatron_fsdp.py, `_post_forward`).
            layers = 2 * max(unit.numel for chunk in chunks for unit in (chunk.dense, chunk.moe))
            found[GATHERED] = (layers + sum(chunk.root.numel for chunk in chunks)) * mix.compute_bytes
        return found


def count_operation_bytes(plan: ResolvedPlan, *, moe: bool) -> int:
    """Return the bytes that the operations of one layer save of a micro-batch.

    A tensor counts once per operation that saves it. Softmax and the next matmul both save unfused scores.
    """
    batch = plan.micro_batch
    saved = sum(_get_saved(batch, moe=moe))
    if batch.attention != "unfused":
        return saved
    heads = batch.model.num_heads // batch.tp
    times = 2 if batch.recompute == "selective" else 1  # otherwise `saved` has one of them
    return saved + times * batch.tokens * batch.seq_len * heads * SOFTMAX_BYTES


def _get_saved(batch: MicroBatch, *, moe: bool) -> Iterator[int]:
    """Yield the bytes of each tensor that a layer saves of one micro-batch (2205.05198 section 4.1)."""
    yield batch.shard_bytes  # the residual stream, input of the first norm
    if batch.recompute == "full":
        return
    light, width = batch.recomputes_light, batch.narrow / batch.element
    parts, mask = batch.model.parts, batch.shard_bytes // batch.element * MASK_BYTES if batch.dropout else 0
    if not light:
        yield round(batch.shard_bytes * width)  # output of the norm, in the type of matmul operands
    yield from _get_saved_by_attention(batch)
    if not parts.parallel:
        yield batch.shard_bytes  # input of the second norm
    if parts.num_norms == 4:
        yield 2 * batch.shard_bytes  # inputs of the norms after attention and the MLP
    yield 2 * mask
    if not light and parts.num_norms > 1:
        yield round(batch.shard_bytes * width)
    wide = batch.tokens * batch.element // batch.tp
    if not moe:
        yield from _get_saved_by_mlp(
            wide * batch.model.ffn_hidden_size, gated=batch.model.is_gated, width=width, light=light
        )
        return
    mixture = batch.model.moe
    assert mixture is not None
    routed = count_expert_rows(mixture, batch.tokens, batch.seq_len) * batch.element
    inner = mixture.expert_ffn_hidden_size // batch.tp
    yield batch.tokens * mixture.num_experts * FP32_BYTES  # probabilities
    yield round(routed * batch.model.hidden_size * width)
    yield from _get_saved_by_mlp(routed * inner, gated=True, width=width, light=light)
    shared = wide * mixture.shared_size
    yield from _get_saved_by_mlp(shared, gated=True, width=width, light=light)


def _get_saved_by_mlp(wide: int, *, gated: bool, width: float, light: bool) -> Iterator[int]:
    """Yield the output of an MLP's first matmul, and the input of the second one."""
    yield wide * (2 if gated else 1)
    if not light:
        yield round(wide * width)


def _get_saved_by_attention(batch: MicroBatch) -> Iterator[int]:
    model, row = batch.model, batch.tokens * batch.element
    heads, width = model.num_heads // batch.tp, batch.narrow / batch.element
    if mla := model.mla:
        yield row * (2 * (mla.q_rank + mla.kv_rank) + mla.rope_head_dim)
        queries = keys = row * heads * (mla.nope_head_dim + mla.rope_head_dim)
        values = out = row * heads * mla.value_head_dim
    else:
        queries = out = row * heads * model.head_size
        keys = values = row * count_local_kv_heads(model.num_kv_heads, batch.tp) * model.head_size
    if model.parts.query_norm != "none":
        yield queries + keys
    if batch.attention == "unfused":
        yield queries + keys + values
        if batch.recompute != "selective":
            score = SOFTMAX_BYTES + (DROPPED_BYTES if batch.dropout else 0)
            yield batch.tokens * batch.seq_len * heads * score
    else:
        yield queries + keys + values + batch.tokens * heads * FP32_BYTES
    yield out
    if batch.narrow != batch.element:
        yield round(out * width)  # a copy in the type of matmul operands


def _count_gradients(batch: MicroBatch, *, moe: bool) -> int:
    """Return the bytes that a layer's backward needs at once: gradients inside an MLP, and its regathered input."""
    mixture, rows, inner = batch.model.moe, batch.tokens, batch.model.ffn_hidden_size
    if moe and mixture is not None:
        rows, inner = count_expert_rows(mixture, batch.tokens, batch.seq_len), mixture.expert_ffn_hidden_size
    return rows * batch.element * (inner * (3 if batch.model.is_gated else 2) // batch.tp + batch.model.hidden_size)
