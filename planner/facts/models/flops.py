"""Floating point operations of a step; a multiply-add counts 2.

Model FLOPs are what the mathematics asks for (PaLM 2204.02311 appendix B; full attention but where layers see a window,
no recompute), of experts with a capacity no more than it lets through; MFU is these over the peak. What is carried out
besides goes by the stack: `planner.hardware.flops`.
"""

from __future__ import annotations

from functools import cache

from planner.facts.models.shapes import expert_rows, is_moe_layer, layer_parameters
from planner.facts.spec import JobSpec, ModelSpec


def model_flops(spec: JobSpec) -> int:
    """Of one step of the whole model: three forwards (2104.04473 equation 3 without recompute)."""
    return 3 * _forward(spec, empty_rows=False)


def single_flops(spec: JobSpec) -> int:
    """Of one step with nothing computed twice: three forwards, and experts' buffers whole."""
    return 3 * _forward(spec, empty_rows=True)


def _forward(spec: JobSpec, *, empty_rows: bool) -> int:
    """Layers and the product with the vocabulary: 2 for each weight a token meets, and attention over its sequence."""
    model, seq_len = spec.model, spec.train.seq_len
    head = 2 * seq_len * model.hidden_size * model.vocab_size
    return spec.train.global_batch * (layer_flops(model, seq_len, empty_rows=empty_rows) + head)


@cache
def layer_flops(model: ModelSpec, seq_len: int, *, empty_rows: bool) -> int:
    """Of all layers' forward on a sequence; `empty_rows`: experts' buffers whole."""
    moe_layers = sum(is_moe_layer(model, i) for i in range(model.num_layers))
    weights = seq_len * (model.num_layers - moe_layers) * layer_weights(model, moe=False)
    if moe_layers and model.moe:
        wanted, computed = seq_len * model.moe.experts_per_token, expert_rows(model.moe, seq_len, seq_len)
        rows = computed if empty_rows else min(wanted, computed)
        others = layer_weights(model, moe=True) - model.moe.experts_per_token * _expert_weights(model)
        weights += moe_layers * (seq_len * others + rows * _expert_weights(model))
    return 2 * weights + seq_len * score_flops(model, seq_len)


def _expert_weights(model: ModelSpec) -> int:
    """Of one expert's products."""
    assert model.moe is not None
    stacked = (p for p in layer_parameters(model, moe=True) if p.is_expert and len(p.shape) == 3)
    return sum(p.numel for p in stacked) // model.moe.num_experts


def layer_weights(model: ModelSpec, *, moe: bool) -> int:
    """Weights of the products that one token meets in a layer."""
    total = sum(p.numel for p in layer_parameters(model, moe=moe) if len(p.shape) > 1 and not p.is_expert)
    if moe and model.moe:
        total += model.moe.experts_per_token * _expert_weights(model)
    return total


def score_flops(model: ModelSpec, seq_len: int) -> int:
    """Queries with keys, and weights with values, of all layers: over the full sequence, in every second layer over a
    window where there is one."""
    windowed = model.num_layers // 2 if model.sliding_window else 0
    keys = (model.num_layers - windowed) * seq_len + windowed * min(model.sliding_window or 0, seq_len)
    if model.mla:
        width = model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim
        return 2 * keys * model.num_heads * width
    return 4 * keys * model.num_heads * model.head_size
