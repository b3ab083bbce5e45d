"""Floating point operations of a step; a multiply-add counts 2.

Model FLOPs are what the mathematics asks for (PaLM 2204.02311 appendix B; full attention but where layers see a window,
no recompute), hardware FLOPs what is carried out with recompute (2205.05198 equations 7 and 8). MFU and HFU are these
over the peak.
"""

from __future__ import annotations

from functools import cache

from planner.facts.models.shapes import is_moe_layer, layer_parameters
from planner.facts.spec import JobSpec, ModelSpec


def model_flops(spec: JobSpec) -> int:
    """Of one step of the whole model: three forwards (2104.04473 equation 3 without recompute)."""
    tokens = spec.train.global_batch * spec.train.seq_len
    return 3 * tokens * forward_flops_per_token(spec.model, spec.train.seq_len)


def hardware_flops(spec: JobSpec) -> int:
    """Of one step with what is computed twice: all layers, or their attention scores."""
    model, train = spec.model, spec.train
    tokens = train.global_batch * train.seq_len
    if spec.layout.recompute == "full":
        return model_flops(spec) + tokens * _layers(model, train.seq_len)
    if spec.layout.recompute == "selective" and train.attention == "unfused":
        return model_flops(spec) + tokens * _scores(model, train.seq_len)
    return model_flops(spec)


def forward_flops_per_token(model: ModelSpec, seq_len: int) -> int:
    """Layers and the product with the vocabulary: 2 for each weight a token meets, and attention over seq_len."""
    return _layers(model, seq_len) + 2 * model.hidden_size * model.vocab_size


@cache
def _layers(model: ModelSpec, seq_len: int) -> int:
    moe_layers = sum(is_moe_layer(model, i) for i in range(model.num_layers))
    dense = (model.num_layers - moe_layers) * layer_weights(model, moe=False)
    routed = moe_layers * layer_weights(model, moe=True) if moe_layers else 0
    return 2 * (dense + routed) + _scores(model, seq_len)


def layer_weights(model: ModelSpec, *, moe: bool) -> int:
    """Weights of the products that one token meets in a layer."""
    total = 0
    for p in layer_parameters(model, moe=moe):
        if len(p.shape) == 1:
            continue
        if p.is_expert and model.moe:
            total += p.numel // model.moe.num_experts * model.moe.experts_per_token if len(p.shape) == 3 else 0
        else:
            total += p.numel
    return total


def _scores(model: ModelSpec, seq_len: int) -> int:
    """Queries with keys, and weights with values, of all layers: over the full sequence, in every second layer over a
    window where there is one."""
    windowed = model.num_layers // 2 if model.sliding_window else 0
    keys = (model.num_layers - windowed) * seq_len + windowed * min(model.sliding_window or 0, seq_len)
    if model.mla:
        width = model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim
        return 2 * keys * model.num_heads * width
    return 4 * keys * model.num_heads * model.head_size
