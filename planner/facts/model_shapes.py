"""Compute parameter shapes, parameter counts, and FLOPs of a transformer.

A multiply-add counts 2 FLOPs. Model FLOPs follow PaLM (2204.02311 appendix B): full attention except in windowed
layers, no recompute, and only the tokens within the capacity of an expert. MFU is model FLOPs over the peak.
`planner.hardware.stacks.hardware_flops` adds the repeated work of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from planner.facts.model_parts import MlaSpec, MoeSpec
from planner.facts.spec import JobSpec, ModelSpec


class Parameter(NamedTuple):
    """Parameter tensor of the unsharded model.

    `tp_dim`: the dim that tp shards; None if tp replicates the tensor.
    `is_expert`: dim 0 is the expert, which ep shards.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    is_expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ParameterUnit(NamedTuple):
    """Parameters that data parallelism shards, gathers, and reduces together."""

    name: str
    parameters: tuple[Parameter, ...]


def is_moe_layer(model: ModelSpec, index: int) -> bool:
    """Return whether layer `index` has experts instead of one MLP."""
    return model.moe is not None and index >= model.moe.dense_layers


def get_expert_capacity(moe: MoeSpec, seq_len: int) -> int | None:
    """Return the maximum tokens of a sequence per expert (2101.03961 equation 3), or None."""
    if moe.capacity_factor is None:
        return None
    return math.ceil(moe.capacity_factor * moe.experts_per_token * seq_len / moe.num_experts)


def count_expert_rows(moe: MoeSpec, tokens: int, seq_len: int) -> int:
    """Return the rows that all experts compute for `tokens` tokens.

    Buffers with a capacity are computed whole, including empty rows.
    """
    capacity = get_expert_capacity(moe, seq_len)
    if capacity is None:
        return tokens * moe.experts_per_token
    return tokens * moe.num_experts * capacity // seq_len


def is_router(parameter: Parameter) -> bool:
    """Return whether a tensor belongs to a router.

    tp replicates routers, but each rank's gradient is only a part of the sum.
    """
    return parameter.name.startswith("moe.router.")


def is_vocabulary(parameter: Parameter) -> bool:
    """Return whether a tensor has one row per token id: the embedding or the head."""
    return parameter.name in ("embedding.weight", "head.weight", "head.bias")


def is_key_or_value(parameter: Parameter) -> bool:
    """Return whether a tensor computes keys or values."""
    return parameter.name.startswith(("attention.k.", "attention.v."))


def get_embedding_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters before the first layer: embedding, learned positions, and the embedding's norm."""
    yield Parameter("embedding.weight", (model.vocab_size, model.hidden_size), 0)
    if model.has_learned_positions:
        yield Parameter("positions.weight", (model.max_seq_len, model.hidden_size), None)
    if model.parts.embedding_norm:
        yield from _hidden_norm("embedding_norm", model)


def _hidden_norm(name: str, model: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters of a norm of hidden states."""
    if model.parts.norm_weight:
        yield from _norm(name, model.hidden_size, bias=bool(model.parts.norm_bias))


def _norm(name: str, size: int, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,), None)
    if bias:
        yield Parameter(f"{name}.bias", (size,), None)


def _linear(name: str, out_size: int, in_size: int, tp_dim: int | None, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (out_size, in_size), tp_dim)
    if bias:
        yield Parameter(f"{name}.bias", (out_size,), 0 if tp_dim == 0 else None)


def _grouped_query_attention(model: ModelSpec) -> Iterator[Parameter]:
    h, parts, size = model.hidden_size, model.parts, model.head_size
    queries, kv, bias = model.num_heads * size, model.num_kv_heads * size, bool(parts.qkv_bias)
    yield from _linear("attention.q", queries, h, 0, bias=bias)
    yield from _linear("attention.k", kv, h, 0, bias=bias)
    yield from _linear("attention.v", kv, h, 0, bias=bias)
    yield from _linear("attention.out", h, queries, 1, bias=bool(parts.out_bias))
    if parts.query_norm == "head":
        yield Parameter("attention.q_norm.weight", (size,), None)
        yield Parameter("attention.k_norm.weight", (size,), None)
    elif parts.query_norm == "full":
        yield Parameter("attention.q_norm.weight", (queries,), None)
        yield Parameter("attention.k_norm.weight", (kv,), None)
    if parts.attention_sinks:
        yield Parameter("attention.sinks", (model.num_heads,), 0)


def _latent_attention(model: ModelSpec, mla: MlaSpec) -> Iterator[Parameter]:
    h, heads = model.hidden_size, model.num_heads
    width = heads * (mla.nope_head_dim + mla.rope_head_dim)
    if not mla.q_rank:
        yield from _linear("attention.q", width, h, 0, bias=False)
    else:
        yield from _linear("attention.q_down", mla.q_rank, h, None, bias=False)
        yield from _norm("attention.q_norm", mla.q_rank, bias=False)
        yield from _linear("attention.q_up", width, mla.q_rank, 0, bias=False)
    yield from _linear("attention.kv_down", mla.kv_rank + mla.rope_head_dim, h, None, bias=False)
    yield from _norm("attention.kv_norm", mla.kv_rank, bias=False)
    yield from _linear("attention.kv_up", heads * (mla.nope_head_dim + mla.value_head_dim), mla.kv_rank, 0, bias=False)
    yield from _linear("attention.out", h, heads * mla.value_head_dim, 1, bias=False)


def _mlp(model: ModelSpec, name: str, inner: int, *, bias: bool) -> Iterator[Parameter]:
    h = model.hidden_size
    if model.is_gated:
        yield from _linear(f"{name}.gate", inner, h, 0, bias=bias)
    yield from _linear(f"{name}.up", inner, h, 0, bias=bias)
    yield from _linear(f"{name}.down", h, inner, 1, bias=bias)


def _experts(model: ModelSpec, moe: MoeSpec) -> Iterator[Parameter]:
    h, inner = model.hidden_size, moe.expert_ffn_hidden_size
    yield Parameter("moe.router.weight", (moe.num_experts, h), None)
    if moe.router_bias:
        yield Parameter("moe.router.bias", (moe.num_experts,), None)
    for p in _mlp(model, "moe.experts", inner, bias=moe.expert_bias):
        yield p._replace(shape=(moe.num_experts, *p.shape), tp_dim=_shift_dim(p.tp_dim), is_expert=True)
    if moe.shared_experts:
        yield from _mlp(model, "moe.shared", moe.shared_size, bias=False)
        if moe.shared_gate:
            yield Parameter("moe.shared_gate.weight", (1, h), None)


def _shift_dim(dim: int | None) -> int | None:
    return None if dim is None else dim + 1


@cache
def get_layer_parameters(model: ModelSpec, *, moe: bool = False) -> tuple[Parameter, ...]:
    """Return the parameters of a layer in the trainer's registration order.

    Weights are (out, in), and those of experts are (expert, out, in).
    """
    parts = model.parts
    attention = _latent_attention(model, model.mla) if model.mla else _grouped_query_attention(model)
    mlp = (
        _experts(model, model.moe)
        if moe and model.moe
        else _mlp(model, "mlp", model.ffn_hidden_size, bias=bool(parts.mlp_bias))
    )
    return (
        *_hidden_norm("attention_norm", model),
        *attention,
        *(_hidden_norm("attention_out_norm", model) if parts.num_norms == 4 else ()),
        *(_hidden_norm("mlp_norm", model) if parts.num_norms > 1 else ()),
        *mlp,
        *(_hidden_norm("mlp_out_norm", model) if parts.num_norms == 4 else ()),
    )


def get_head_parameters(model: ModelSpec, *, own_head: bool) -> Iterator[Parameter]:
    """Yield the parameters after the last layer: norm, and the head if it is not tied."""
    yield from _hidden_norm("final_norm", model)
    if own_head:
        yield Parameter("head.weight", (model.vocab_size, model.hidden_size), 0)
    if model.parts.head_bias:
        yield Parameter("head.bias", (model.vocab_size,), 0)


def count_parameters(model: ModelSpec) -> int:
    """Return the trainable parameters of the model, with a tied table counted once.

    Exact: GPT-2 124,439,808; Llama-3 8B 8,030,261,248; Mixtral 8x7B 46,702,792,704.
    """
    dense, moe = _count_layer_kinds(model)
    layers = dense * _sum_numel(get_layer_parameters(model)) + moe * _sum_numel(get_layer_parameters(model, moe=True))
    return layers + _count_end_parameters(model)


def count_active_parameters(model: ModelSpec) -> int:
    """Return the parameters that process one token. Mixtral 8x7B: 12,879,925,248."""
    _, moe_layers = _count_layer_kinds(model)
    if model.moe is None:
        return count_parameters(model)
    expert = sum(p.numel for p in get_layer_parameters(model, moe=True) if p.is_expert) // model.moe.num_experts
    return count_parameters(model) - moe_layers * expert * (model.moe.num_experts - model.moe.experts_per_token)


def _count_layer_kinds(model: ModelSpec) -> tuple[int, int]:
    """Return (layers with one MLP, layers with experts)."""
    dense = model.num_layers if model.moe is None else min(model.moe.dense_layers, model.num_layers)
    return dense, model.num_layers - dense


def _sum_numel(parameters: tuple[Parameter, ...]) -> int:
    return sum(p.numel for p in parameters)


def _count_end_parameters(model: ModelSpec) -> int:
    return _sum_numel(
        (*get_embedding_parameters(model), *get_head_parameters(model, own_head=not model.tied_embeddings))
    )


def get_chunk_units(model: ModelSpec, layers: range, *, first: bool, last: bool) -> list[ParameterUnit]:
    """Return the unsharded units of a chunk: each layer, then the root unit.

    The root has the parameters outside the layers. With tied embeddings, the head reuses the embedding if both are in
    one stage, and is a replica otherwise.
    """
    units = [ParameterUnit(f"layers.{i}", get_layer_parameters(model, moe=is_moe_layer(model, i))) for i in layers]
    root: list[Parameter] = []
    if first:
        root += get_embedding_parameters(model)
    if last:
        root += get_head_parameters(model, own_head=not (model.tied_embeddings and first))
    if root:
        units.append(ParameterUnit("root", tuple(root)))
    return units


def compute_model_flops(spec: JobSpec) -> int:
    """Return the model FLOPs of a step: three forwards (2104.04473 equation 3)."""
    return 3 * _compute_forward_flops(spec, empty_rows=False)


def compute_single_pass_flops(spec: JobSpec) -> int:
    """Return the FLOPs of a step without recompute, including empty rows of experts."""
    return 3 * _compute_forward_flops(spec, empty_rows=True)


def _compute_forward_flops(spec: JobSpec, *, empty_rows: bool) -> int:
    """Return the FLOPs of a forward: layers, attention, and the head."""
    model, seq_len = spec.model, spec.train.seq_len
    head = 2 * seq_len * model.hidden_size * model.vocab_size
    return spec.train.global_batch * (compute_layer_flops(model, seq_len, empty_rows=empty_rows) + head)


@cache
def compute_layer_flops(model: ModelSpec, seq_len: int, *, empty_rows: bool) -> int:
    """Return the FLOPs of all layers' forward on one sequence.

    Args:
        empty_rows: Include the empty rows of expert buffers.
    """
    moe_layers = sum(is_moe_layer(model, i) for i in range(model.num_layers))
    weights = seq_len * (model.num_layers - moe_layers) * count_layer_weights(model, moe=False)
    if moe_layers and model.moe:
        wanted, computed = seq_len * model.moe.experts_per_token, count_expert_rows(model.moe, seq_len, seq_len)
        rows = computed if empty_rows else min(wanted, computed)
        others = count_layer_weights(model, moe=True) - model.moe.experts_per_token * _count_expert_weights(model)
        weights += moe_layers * (seq_len * others + rows * _count_expert_weights(model))
    return 2 * weights + seq_len * compute_score_flops(model, seq_len)


def _count_expert_weights(model: ModelSpec) -> int:
    """Return the matmul weights of one expert."""
    assert model.moe is not None
    stacked = (p for p in get_layer_parameters(model, moe=True) if p.is_expert and len(p.shape) == 3)
    return sum(p.numel for p in stacked) // model.moe.num_experts


def count_layer_weights(model: ModelSpec, *, moe: bool) -> int:
    """Return the matmul weights of a layer that one token meets."""
    total = sum(p.numel for p in get_layer_parameters(model, moe=moe) if len(p.shape) > 1 and not p.is_expert)
    if moe and model.moe:
        total += model.moe.experts_per_token * _count_expert_weights(model)
    return total


def compute_score_flops(model: ModelSpec, seq_len: int) -> int:
    """Return the FLOPs per token of attention scores and weighted values of all layers.

    A layer with a sliding window attends only inside the window.
    """
    windowed = model.num_windowed_layers
    keys = (model.num_layers - windowed) * seq_len + windowed * min(model.sliding_window or 0, seq_len)
    if model.mla:
        width = model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim
        return 2 * keys * model.num_heads * width
    return 4 * keys * model.num_heads * model.head_size
