"""Compute memory of published runs that no spec describes: their kernels, losses, and optimizers."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published import megatron_tests
from benchmarks.published.mapping import MappedRow
from planner.cost.memory import get_layer_bytes, get_memory, get_stage_memory
from planner.cost.pipeline_simulation import count_chunks_in_flight
from planner.facts.placements import get_padded_vocab_size, get_vocab_rows
from planner.facts.precision import ADAM_MOMENT_BYTES, FP32_BYTES, get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import get_local_units
from planner.hardware.kernels import Gemm, build_layer_kernels
from planner.hardware.stack_options import EAGER_SCORES
from planner.hardware.stacks import EAGER_NORMS

WORKSPACE_BYTES = 32 * 2**20
EAGER_NORM_BYTES = 8
EAGER_SCORE_BYTES = 12


def compute_eager_bytes(planned: MappedRow, spec: JobSpec) -> int:
    """Return additional bytes of eager kernels: input and output of norms in fp32, and fp32 scores in one backward."""
    layout, train = spec.layout, spec.train
    tokens = spec.micro_batch_size * train.seq_len // layout.cp
    extra = 0
    if planned.kernels.norms == EAGER_NORMS:
        rows = tokens // (layout.tp if layout.sequence_parallel else 1)
        layers = 1 if layout.recompute == "full" else spec.model.num_layers // layout.pp
        chunks = count_chunks_in_flight(layout, 0, train.micro_batches)
        flight = 1 if layout.recompute == "full" else chunks / layout.virtual_stages
        extra += round(2 * rows * spec.model.hidden_size * layers * flight * EAGER_NORM_BYTES)
    if planned.kernels.scores == EAGER_SCORES:
        extra += tokens * train.seq_len * spec.model.num_heads // layout.tp * EAGER_SCORE_BYTES
    return extra


def compute_kempner_bytes(planned: MappedRow, spec: JobSpec) -> int:
    """Return whole fp32 gradients until the last micro-batch, and the loss without PP.

    The loss has logits of the whole vocabulary, their log-softmax, and both gradients in 16 bits, and the last three in
    fp32. The planner counts only a rank's share of them.
    """
    if not planned.kempner:
        return 0
    layout, train, extra = spec.layout, spec.train, 0
    if layout.zero == 3 and train.micro_batches > 1:
        extra += sum(p.numel for unit in get_local_units(spec, 0) for p in unit.parameters) * FP32_BYTES
    if layout.pp == 1:
        logits = spec.micro_batch_size * train.seq_len * spec.model.vocab_size
        extra += logits * 4 * 2 - logits // layout.tp * (2 + 3 * FP32_BYTES)
    return extra


def compute_frozen_bytes(planned: MappedRow, spec: JobSpec) -> int:
    """Return bytes of gradients and moments that frozen weights do not need. Adapters are not counted."""
    if not planned.kernels.freezes_weights:
        return 0
    parts = get_memory(spec, 0)
    return parts["gradients"] + parts["optimizer"]


class MegatronMemory(NamedTuple):
    """Additional bytes of Megatron-LM's tests on the last rank: between steps, and more at the peak."""

    steady: int
    more: int


def compute_megatron_memory(planned: MappedRow) -> MegatronMemory:
    """Return zeros for rows of other projects."""
    if not planned.own_tests:
        return MegatronMemory(0, 0)
    ends = _compute_gathered_end_bytes(planned)
    return MegatronMemory(
        _compute_workspace_bytes(planned)
        + _compute_score_buffer_bytes(planned)
        + _compute_mtp_state_bytes(planned)
        + _compute_optimizer_bytes(planned)
        + _compute_state_bytes(planned, _count_unplanned_parameters(planned))
        + _compute_dummy_gradient_bytes(planned)
        + ends,
        _compute_weighted_expert_bytes(planned)
        + _compute_loss_bytes(planned)
        + _compute_microbatch_group_bytes(planned)
        - _compute_recomputed_bytes(planned)
        - ends,
    )


def _matches(planned: MappedRow, pattern: str) -> bool:
    return re.search(pattern, planned.text) is not None


def _compute_workspace_bytes(planned: MappedRow) -> int:
    """Return workspaces of matmuls, 32 MiB each.

    cuBLAS has one in the forward thread and one in the backward thread (CUBLAS_WORKSPACE_CONFIG=:4096:8). Transformer
    Engine has one (`get_cublas_workspace_size_bytes`), which routers always use (moe_utils.py,
    `router_gating_linear`). Each of 4 expert streams, a fp32 router (`te_general_gemm`), and overlapped tensor
    communication (`initialize_ub`: one for each of 3 streams) have more. Tests of the fit half that overlap the
    all-to-all of two micro-batches have one more.
    """
    mixed = planned.spec.model.moe is not None
    number = 2 + (mixed or not _matches(planned, megatron_tests.LOCAL)) + _matches(planned, megatron_tests.FP32_ROUTER)
    number += 4 if mixed and not planned.kernels.separate_experts else 0
    number += 2 if _matches(planned, megatron_tests.OVERLAPS_TENSORS) else 0
    number += _matches(planned, megatron_tests.OVERLAPS_EXPERTS)
    return number * WORKSPACE_BYTES


def _compute_score_buffer_bytes(planned: MappedRow) -> int:
    """Return the buffer of attention scores without Transformer Engine, which layers share
    (dot_product_attention.py, `get_global_memory_buffer`).
    """
    if not _matches(planned, megatron_tests.LOCAL):
        return 0
    spec = planned.spec
    scores = _count_tokens(spec) * spec.train.seq_len * spec.model.num_heads // spec.layout.tp
    return scores * get_mixed_precision(spec.train.precision).compute_bytes


def _compute_optimizer_bytes(planned: MappedRow) -> int:
    """Return bytes in addition to bf16 and Adam.

    fp16 sums gradients in 16 bits, and the optimizer converts its shard to fp32 (arguments.py: only bf16 accumulates in
    fp32; optimizer.py, `_copy_model_grads_to_main_grads`). Muon has one moment for matrices (emerging_optimizers.py). A
    resumed run may keep its loaded moments.
    """
    spec = planned.spec
    rank = get_stage_memory(spec).get_rank(spec.layout.pp - 1)
    whole = sum(chunk.parameters.count_elements() for chunk in rank.chunks)
    shard = sum(chunk.parameters.count_elements(shard=True) for chunk in rank.chunks) if spec.layout.zero else whole
    if planned.half:
        mix = get_mixed_precision(spec.train.precision)
        return shard * FP32_BYTES - whole * (mix.gradient_bytes - mix.compute_bytes)
    if planned.loaded_twice:
        return shard * ADAM_MOMENT_BYTES
    if _matches(planned, megatron_tests.MUON):
        roots = [chunk.parameters.root for chunk in rank.chunks]
        root = sum(unit.shard if spec.layout.zero else unit.numel for unit in roots)
        return -(shard - root) * FP32_BYTES
    return 0


def _compute_dummy_gradient_bytes(planned: MappedRow) -> int:
    """Return dummy gradients of fused gradient accumulation: one per weight shape, which are reused
    (layers.py and Transformer Engine's base.py, `get_dummy_wgrad`).
    """
    if _matches(planned, megatron_tests.ADDS_APART):
        return 0
    spec = planned.spec
    chunks = get_stage_memory(spec).get_rank(spec.layout.pp - 1).chunks
    kinds = {moe for chunk in chunks for moe, _ in chunk.parameters.runs}
    kernels = [kernel for moe in kinds for kernel in build_layer_kernels(spec, moe=moe, fused_projections=True).forward]
    shapes = {(kernel.n, kernel.k) for kernel in kernels if isinstance(kernel, Gemm) and not kernel.wide}
    shapes.add((get_vocab_rows(spec), spec.model.hidden_size))
    return sum(n * k for n, k in shapes) * get_mixed_precision(spec.train.precision).compute_bytes


def _compute_gathered_end_bytes(planned: MappedRow) -> int:
    """Return bytes of embedding, head, and last norm, which stay gathered after a step."""
    if not _matches(planned, megatron_tests.KEEPS_ENDS):
        return 0
    spec = planned.spec
    chunks = get_stage_memory(spec).get_rank(spec.layout.pp - 1).chunks
    return (
        sum(chunk.parameters.root.numel for chunk in chunks) * get_mixed_precision(spec.train.precision).compute_bytes
    )


def _count_unplanned_parameters(planned: MappedRow) -> int:
    """Return parameters of the last rank that the planned architecture lacks, minus those that the row lacks.

    Models with gated MLPs or experts are planned as Llama. Llama has no biases and positions, which Megatron has by
    default.
    """
    spec, without = planned.spec, _matches(planned, megatron_tests.WITHOUT_BIAS)
    model, layout = spec.model, spec.layout
    h, tp = model.hidden_size, layout.tp
    chunks = get_stage_memory(spec).get_rank(layout.pp - 1).chunks
    layers = sum(count for chunk in chunks for _, count in chunk.parameters.runs)
    wide = model.ffn_hidden_size * (2 if planned.gated else 1)
    biases = layers * ((3 * h + wide) // tp + 2 * h) if model.moe is None and model.mla is None else 0
    if model.arch == "gpt":
        return -biases if without else 0
    found = 0 if without else biases
    if not _matches(planned, megatron_tests.WITHOUT_NORM_BIAS):
        found += (2 * layers + 1) * h
    if layout.pp == 1 and not _matches(planned, megatron_tests.ROTARY):
        found += model.max_seq_len * h
    return found


def _compute_state_bytes(planned: MappedRow, elements: int) -> int:
    """Return weights, gradients, and moments of additional parameters outside experts."""
    layout, mix = planned.spec.layout, get_mixed_precision(planned.spec.train.precision)
    shards = layout.shard_ranks if layout.zero else 1
    whole = (mix.compute_bytes if layout.zero < 3 else 0) + (mix.gradient_bytes if layout.zero < 2 else 0)
    return elements * whole + elements * (mix.state_bytes - whole) // shards


def _compute_mtp_state_bytes(planned: MappedRow) -> int:
    """Return the state of the MTP head without its layer: the embedding, and a projection of both hidden
    states (multi_token_prediction.py, `eh_proj`).
    """
    if not planned.predicts_two:
        return 0
    spec, mix = planned.spec, get_mixed_precision(planned.spec.train.precision)
    model, layout = spec.model, spec.layout
    table = get_padded_vocab_size(model.vocab_size, layout.tp) // layout.tp * model.hidden_size
    elements = table + 2 * model.hidden_size**2 // layout.tp
    return elements * (mix.compute_bytes + mix.gradient_bytes) + elements * mix.optimizer_bytes // (
        layout.dp * layout.cp
    )


def _count_tokens(spec: JobSpec) -> int:
    return spec.micro_batch_size * spec.train.seq_len // spec.layout.cp


def _compute_weighted_expert_bytes(planned: MappedRow) -> int:
    """Return expert activations that are stored again, multiplied by their probabilities.

    Tests without SwiGLU have no fused kernel for both (--no-bias-gelu-fusion; mlp.py, `per_token_scale`). Rows with
    gated experts have 3/2 of the width.
    """
    spec, moe = planned.spec, planned.spec.model.moe
    if moe is None or planned.gated:
        return 0
    wide = _count_tokens(spec) * moe.experts_per_token * moe.expert_ffn_hidden_size * 3 // 2 // spec.layout.tp
    return round(
        2 * wide * (spec.model.num_layers - moe.dense_layers) / spec.layout.pp * _count_micro_batches_in_flight(spec)
    )


def _compute_loss_bytes(planned: MappedRow) -> int:
    """Return bytes per logit in addition to its float and its softmax.

    A fused loss also stores the exponential (fused_cross_entropy.py). A MTP loss stores its softmax and the gradients
    of earlier logits.
    """
    spec = planned.spec
    logits = _count_tokens(spec) * (get_padded_vocab_size(spec.model.vocab_size, spec.layout.tp) // spec.layout.tp)
    each = FP32_BYTES * (_matches(planned, megatron_tests.FUSED_LOSS) + planned.predicts_two)
    if _matches(planned, megatron_tests.DEFERS_GRADIENTS):
        each += megatron_tests.DEFERRED * get_mixed_precision(spec.train.precision).compute_bytes
    return logits * each


def _compute_microbatch_group_bytes(planned: MappedRow) -> int:
    """Return bytes of additional chunks in flight if a microbatch group is larger than PP
    (schedules.py, `num_warmup_microbatches`).
    """
    if not _matches(planned, megatron_tests.WIDER_TURNS):
        return 0
    spec = planned.spec
    layout, more = spec.layout, (spec.layout.virtual_stages - 1) * (megatron_tests.TURN - spec.layout.pp)
    return more * get_layer_bytes(spec) * spec.model.num_layers // (layout.pp * layout.virtual_stages)


def _compute_recomputed_bytes(planned: MappedRow) -> int:
    """Return bytes that recompute of norms, MLA up-projections, and expert activations saves."""
    if not _matches(planned, megatron_tests.MAKES_AGAIN):
        return 0
    spec = planned.spec
    model, tp, element = spec.model, spec.layout.tp, get_mixed_precision(spec.train.precision).compute_bytes
    assert model.mla is not None
    assert model.moe is not None
    inside = model.mla.nope_head_dim + model.mla.rope_head_dim
    wide = model.num_heads * (2 * inside + model.mla.value_head_dim) + 2 * model.hidden_size
    wide += (model.moe.experts_per_token + model.moe.shared_experts) * model.moe.expert_ffn_hidden_size
    rank = get_stage_memory(spec).get_rank(spec.layout.pp - 1)
    layers = sum(count for chunk in rank.chunks for _, count in chunk.parameters.runs)
    return round(_count_tokens(spec) * wide // tp * element * layers * _count_micro_batches_in_flight(spec))


def _count_micro_batches_in_flight(spec: JobSpec) -> float:
    """Return micro-batches of all layers of the last rank."""
    last = spec.layout.pp - 1
    return count_chunks_in_flight(spec.layout, last, spec.train.micro_batches) / spec.layout.virtual_stages
