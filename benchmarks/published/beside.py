"""What published runs keep beside what the planner counts: their kernels, losses and optimisers are in no spec."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published import own_tests
from benchmarks.published.mapping import Planned
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


def eager_bytes(planned: Planned, spec: JobSpec) -> int:
    """What eager kernels keep beside the planner's own: of a norm its input and its output in fp32, of scores their
    fp32 copies in one layer's backward."""
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


def kempner_bytes(planned: Planned, spec: JobSpec) -> int:
    """Whole gradients added up in fp32 until the last micro-batch is reduced; and the loss without a pipe: logits of
    the whole vocabulary, their log-softmax and both gradients in 16 bits, where the tape has a rank's share of them,
    with the last three in fp32."""
    if not planned.kempner:
        return 0
    layout, train, extra = spec.layout, spec.train, 0
    if layout.zero == 3 and train.micro_batches > 1:
        extra += sum(p.numel for unit in get_local_units(spec, 0) for p in unit.parameters) * FP32_BYTES
    if layout.pp == 1:
        logits = spec.micro_batch_size * train.seq_len * spec.model.vocab_size
        extra += logits * 4 * 2 - logits // layout.tp * (2 + 3 * FP32_BYTES)
    return extra


def frozen_bytes(planned: Planned, spec: JobSpec) -> int:
    """Gradients and moments that frozen weights do without; of adapters nothing is counted."""
    if not planned.kernels.freezes_weights:
        return 0
    parts = get_memory(spec, 0)
    return parts["gradients"] + parts["optimizer"]


class Own(NamedTuple):
    """Bytes of Megatron-LM's own tests on the last rank: from step to step, and more at the highest moment."""

    steady: int
    more: int


def own_bytes(planned: Planned) -> Own:
    """Nothing for any other row."""
    if not planned.own_tests:
        return Own(0, 0)
    ends = _kept_ends_bytes(planned)
    return Own(
        _workspaces(planned)
        + _scores_bytes(planned)
        + _second_head_bytes(planned)
        + _optimizer_bytes(planned)
        + _state_bytes(planned, _unlike_elements(planned))
        + _stand_in_bytes(planned)
        + ends,
        _weighed_bytes(planned) + _loss_bytes(planned) + _turn_bytes(planned) - _made_again_bytes(planned) - ends,
    )


def _has(planned: Planned, pattern: str) -> bool:
    return re.search(pattern, planned.text) is not None


def _workspaces(planned: Planned) -> int:
    """What stays allocated for products: 32 MiB each of cuBLAS (CUBLAS_WORKSPACE_CONFIG=:4096:8) in forward's thread
    and in backward's, and of Transformer Engine (`get_cublas_workspace_size_bytes`), by which a router's product always
    runs (moe_utils.py, `router_gating_linear`); of each of the 4 streams on which
    it computes experts together, of a router in fp32 (Megatron-LM's `te_general_gemm` brings one), and twice more
    where it sends beside products (`initialize_ub`: one for each of 3 streams). Where one micro-batch's tokens are sent
    beside another's products, on streams of their own, a test of the fit half has one more."""
    mixed = planned.spec.model.moe is not None
    number = 2 + (mixed or not _has(planned, own_tests.LOCAL)) + _has(planned, own_tests.FP32_ROUTER)
    number += 4 if mixed and not planned.kernels.separate_experts else 0
    number += 2 if _has(planned, own_tests.OVERLAPS_TENSORS) else 0
    number += _has(planned, own_tests.OVERLAPS_EXPERTS)
    return number * WORKSPACE_BYTES


def _scores_bytes(planned: Planned) -> int:
    """The buffer that scores are computed into without Transformer Engine, which is kept for the next layer
    (dot_product_attention.py, `get_global_memory_buffer`)."""
    if not _has(planned, own_tests.LOCAL):
        return 0
    spec = planned.spec
    scores = _tokens(spec) * spec.train.seq_len * spec.model.num_heads // spec.layout.tp
    return scores * get_mixed_precision(spec.train.precision).compute_bytes


def _optimizer_bytes(planned: Planned) -> int:
    """Beside bf16's and Adam's. fp16 sums gradients in 16 bits and the optimiser makes fp32 ones of its share
    (arguments.py: only bf16 accumulates in fp32; optimizer.py, `_copy_model_grads_to_main_grads`). Muon has one moment
    of a layer's matrices (emerging_optimizers.py). What was loaded may be there still."""
    spec = planned.spec
    rank = get_stage_memory(spec).get_rank(spec.layout.pp - 1)
    whole = sum(chunk.parameters.count_elements() for chunk in rank.chunks)
    shard = sum(chunk.parameters.count_elements(shard=True) for chunk in rank.chunks) if spec.layout.zero else whole
    if planned.half:
        mix = get_mixed_precision(spec.train.precision)
        return shard * FP32_BYTES - whole * (mix.gradient_bytes - mix.compute_bytes)
    if planned.loaded_twice:
        return shard * ADAM_MOMENT_BYTES
    if _has(planned, own_tests.MUON):
        roots = [chunk.parameters.root for chunk in rank.chunks]
        root = sum(unit.shard if spec.layout.zero else unit.numel for unit in roots)
        return -(shard - root) * FP32_BYTES
    return 0


def _stand_in_bytes(planned: Planned) -> int:
    """Where products add to the gradients so far, what stands for a weight's own gradient: one of each shape, kept for
    the next (layers.py and Transformer Engine's base.py, `get_dummy_wgrad`)."""
    if _has(planned, own_tests.ADDS_APART):
        return 0
    spec = planned.spec
    chunks = get_stage_memory(spec).get_rank(spec.layout.pp - 1).chunks
    kinds = {moe for chunk in chunks for moe, _ in chunk.parameters.runs}
    kernels = [kernel for moe in kinds for kernel in build_layer_kernels(spec, moe=moe, fused_projections=True).forward]
    shapes = {(kernel.n, kernel.k) for kernel in kernels if isinstance(kernel, Gemm) and not kernel.wide}
    shapes.add((get_vocab_rows(spec), spec.model.hidden_size))
    return sum(n * k for n, k in shapes) * get_mixed_precision(spec.train.precision).compute_bytes


def _kept_ends_bytes(planned: Planned) -> int:
    """Tables, head and last norm, which stay gathered when a step has ended."""
    if not _has(planned, own_tests.KEEPS_ENDS):
        return 0
    spec = planned.spec
    chunks = get_stage_memory(spec).get_rank(spec.layout.pp - 1).chunks
    return (
        sum(chunk.parameters.root.numel for chunk in chunks) * get_mixed_precision(spec.train.precision).compute_bytes
    )


def _unlike_elements(planned: Planned) -> int:
    """Parameters of the last rank that the planned architecture lacks, less those that the row's lacks. Models with
    gates or experts are planned as Llama's, without biases and positions, which Megatron's have unless told not to."""
    spec, without = planned.spec, _has(planned, own_tests.WITHOUT_BIAS)
    model, layout = spec.model, spec.layout
    h, tp = model.hidden_size, layout.tp
    chunks = get_stage_memory(spec).get_rank(layout.pp - 1).chunks
    layers = sum(count for chunk in chunks for _, count in chunk.parameters.runs)
    wide = model.ffn_hidden_size * (2 if planned.gated else 1)
    biases = layers * ((3 * h + wide) // tp + 2 * h) if model.moe is None and model.mla is None else 0
    if model.arch == "gpt":
        return -biases if without else 0
    found = 0 if without else biases
    if not _has(planned, own_tests.WITHOUT_NORM_BIAS):
        found += (2 * layers + 1) * h
    if layout.pp == 1 and not _has(planned, own_tests.ROTARY):
        found += model.max_seq_len * h
    return found


def _state_bytes(planned: Planned, elements: int) -> int:
    """Of so many parameters more that no expert has: weights, gradients, moments, divided as the rest."""
    layout, mix = planned.spec.layout, get_mixed_precision(planned.spec.train.precision)
    shards = layout.shard_ranks if layout.zero else 1
    whole = (mix.compute_bytes if layout.zero < 3 else 0) + (mix.gradient_bytes if layout.zero < 2 else 0)
    return elements * whole + elements * (mix.state_bytes - whole) // shards


def _second_head_bytes(planned: Planned) -> int:
    """State of what predicts a second token, beside its layer: the embedding's table, and a projection of both hidden
    states (multi_token_prediction.py, `eh_proj`)."""
    if not planned.predicts_two:
        return 0
    spec, mix = planned.spec, get_mixed_precision(planned.spec.train.precision)
    model, layout = spec.model, spec.layout
    table = get_padded_vocab_size(model.vocab_size, layout.tp) // layout.tp * model.hidden_size
    elements = table + 2 * model.hidden_size**2 // layout.tp
    return elements * (mix.compute_bytes + mix.gradient_bytes) + elements * mix.optimizer_bytes // (
        layout.dp * layout.cp
    )


def _tokens(spec: JobSpec) -> int:
    return spec.micro_batch_size * spec.train.seq_len // spec.layout.cp


def _weighed_bytes(planned: Planned) -> int:
    """What experts' activations take again, times their probabilities, where no kernel does both: in tests without
    swiglu (--no-bias-gelu-fusion; mlp.py, `per_token_scale`). Gated experts stand for theirs: of three halves the
    width."""
    spec, moe = planned.spec, planned.spec.model.moe
    if moe is None or planned.gated:
        return 0
    wide = _tokens(spec) * moe.experts_per_token * moe.expert_ffn_hidden_size * 3 // 2 // spec.layout.tp
    return round(2 * wide * (spec.model.num_layers - moe.dense_layers) / spec.layout.pp * _in_flight(spec))


def _loss_bytes(planned: Planned) -> int:
    """Beside a logit, its float and the softmax that takes its place: of a fused loss the exponential apart
    (fused_cross_entropy.py), of a second token's loss its softmax, and gradients of earlier logits that wait."""
    spec = planned.spec
    logits = _tokens(spec) * (get_padded_vocab_size(spec.model.vocab_size, spec.layout.tp) // spec.layout.tp)
    each = FP32_BYTES * (_has(planned, own_tests.FUSED_LOSS) + planned.predicts_two)
    if _has(planned, own_tests.DEFERS_GRADIENTS):
        each += own_tests.DEFERRED * get_mixed_precision(spec.train.precision).compute_bytes
    return logits * each


def _turn_bytes(planned: Planned) -> int:
    """Of the chunks more that are in flight where a chunk's turn is wider than the pipe (schedules.py,
    `num_warmup_microbatches`)."""
    if not _has(planned, own_tests.WIDER_TURNS):
        return 0
    spec = planned.spec
    layout, more = spec.layout, (spec.layout.virtual_stages - 1) * (own_tests.TURN - spec.layout.pp)
    return more * get_layer_bytes(spec) * spec.model.num_layers // (layout.pp * layout.virtual_stages)


def _made_again_bytes(planned: Planned) -> int:
    """What is not kept where outputs of norms, of latent attention's second products and of experts' activations are
    made again: both norms', queries, keys and values, and what the experts' second product takes."""
    if not _has(planned, own_tests.MAKES_AGAIN):
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
    return round(_tokens(spec) * wide // tp * element * layers * _in_flight(spec))


def _in_flight(spec: JobSpec) -> float:
    """Micro-batches of all the last rank's layers."""
    last = spec.layout.pp - 1
    return count_chunks_in_flight(spec.layout, last, spec.train.micro_batches) / spec.layout.virtual_stages
