"""The exact shape of every parameter of a decoder-only transformer, and in which units they are sharded.

Floating point operations of a step; a multiply-add counts 2.

Model FLOPs are what the mathematics asks for (PaLM 2204.02311 appendix B; full attention but where layers see a window,
no recompute), of experts with a capacity no more than it lets through; MFU is these over the peak. What is carried out
besides goes by the stack: `planner.hardware.stacks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from planner.facts.spec import JobSpec, MlaSpec, ModelSpec, MoeSpec


class Parameter(NamedTuple):
    """One parameter tensor of the whole, unsharded model.

    `tp_dim` is the dim that tensor parallelism shards, None where it replicates. `is_expert`: dim 0 counts experts,
    which expert parallelism divides.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    is_expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Unit(NamedTuple):
    """Parameters that data parallelism shards, gathers and reduces together."""

    name: str
    parameters: tuple[Parameter, ...]


def is_moe_layer(model: ModelSpec, index: int) -> bool:
    """Whether layer `index` has experts in place of one MLP."""
    return model.moe is not None and index >= model.moe.dense_layers


def expert_capacity(moe: MoeSpec, seq_len: int) -> int | None:
    """Most tokens of one sequence that an expert takes (Switch 2101.03961 equation 3), None where none is dropped."""
    if moe.capacity_factor is None:
        return None
    return math.ceil(moe.capacity_factor * moe.experts_per_token * seq_len / moe.num_experts)


def expert_rows(moe: MoeSpec, tokens: int, seq_len: int) -> int:
    """Rows that all experts together compute for `tokens` of sequences of `seq_len`: buffers of a capacity are computed
    whole, with what of them stays empty."""
    capacity = expert_capacity(moe, seq_len)
    if capacity is None:
        return tokens * moe.experts_per_token
    return tokens * moe.num_experts * capacity // seq_len


def is_router(parameter: Parameter) -> bool:
    """Whether a tensor decides where tokens go: tp copies it, but each rank's gradient is a part of the sum."""
    return parameter.name.startswith("moe.router.")


def is_vocabulary(parameter: Parameter) -> bool:
    """Whether a tensor has a row for each token: the embedding's table and the head's."""
    return parameter.name in ("embedding.weight", "head.weight")


def is_key_or_value(parameter: Parameter) -> bool:
    """Whether a tensor makes keys or values, whose heads may be fewer than the tp ranks."""
    return parameter.name.startswith(("attention.k.", "attention.v."))


def embedding_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """What the first stage holds beside its layers: token table, and learned positions for gpt."""
    yield Parameter("embedding.weight", (model.vocab_size, model.hidden_size), 0)
    if model.arch == "gpt":
        yield Parameter("positions.weight", (model.max_seq_len, model.hidden_size), None)


def _norm(name: str, size: int, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,), None)
    if bias:
        yield Parameter(f"{name}.bias", (size,), None)


def _linear(name: str, out_size: int, in_size: int, tp_dim: int | None, *, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (out_size, in_size), tp_dim)
    if bias:
        yield Parameter(f"{name}.bias", (out_size,), 0 if tp_dim == 0 else None)


def _grouped_query_attention(model: ModelSpec) -> Iterator[Parameter]:
    h, bias = model.hidden_size, model.arch == "gpt"
    queries, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    yield from _linear("attention.q", queries, h, 0, bias=bias)
    yield from _linear("attention.k", kv, h, 0, bias=bias)
    yield from _linear("attention.v", kv, h, 0, bias=bias)
    yield from _linear("attention.out", h, queries, 1, bias=bias)


def _latent_attention(model: ModelSpec, mla: MlaSpec) -> Iterator[Parameter]:
    h, heads = model.hidden_size, model.num_heads
    yield from _linear("attention.q_down", mla.q_rank, h, None, bias=False)
    yield from _norm("attention.q_norm", mla.q_rank, bias=False)
    yield from _linear("attention.q_up", heads * (mla.nope_head_dim + mla.rope_head_dim), mla.q_rank, 0, bias=False)
    yield from _linear("attention.kv_down", mla.kv_rank + mla.rope_head_dim, h, None, bias=False)
    yield from _norm("attention.kv_norm", mla.kv_rank, bias=False)
    yield from _linear("attention.kv_up", heads * (mla.nope_head_dim + mla.value_head_dim), mla.kv_rank, 0, bias=False)
    yield from _linear("attention.out", h, heads * mla.value_head_dim, 1, bias=False)


def _mlp(model: ModelSpec, name: str, inner: int, *, bias: bool) -> Iterator[Parameter]:
    h = model.hidden_size
    if model.arch == "llama":
        yield from _linear(f"{name}.gate", inner, h, 0, bias=bias)
    yield from _linear(f"{name}.up", inner, h, 0, bias=bias)
    yield from _linear(f"{name}.down", h, inner, 1, bias=bias)


def _experts(model: ModelSpec, moe: MoeSpec) -> Iterator[Parameter]:
    h, inner = model.hidden_size, moe.expert_ffn_hidden_size
    yield Parameter("moe.router.weight", (moe.num_experts, h), None)
    if moe.router_bias:
        yield Parameter("moe.router.bias", (moe.num_experts,), None)
    for p in _mlp(model, "moe.experts", inner, bias=moe.expert_bias):
        yield p._replace(shape=(moe.num_experts, *p.shape), tp_dim=_next(p.tp_dim), is_expert=True)
    if moe.shared_experts:
        yield from _mlp(model, "moe.shared", moe.shared_experts * inner, bias=False)


def _next(dim: int | None) -> int | None:
    return None if dim is None else dim + 1


@cache
def layer_parameters(model: ModelSpec, *, moe: bool = False) -> tuple[Parameter, ...]:
    """One transformer layer, in the trainer's registration order. Weights are (out, in), experts (expert, out, in)."""
    bias = model.arch == "gpt"
    attention = _latent_attention(model, model.mla) if model.mla else _grouped_query_attention(model)
    mlp = _experts(model, model.moe) if moe and model.moe else _mlp(model, "mlp", model.ffn_hidden_size, bias=bias)
    return (
        *_norm("attention_norm", model.hidden_size, bias=bias),
        *attention,
        *_norm("mlp_norm", model.hidden_size, bias=bias),
        *mlp,
    )


def head_parameters(model: ModelSpec, *, own_head: bool) -> Iterator[Parameter]:
    """What the last stage holds beside its layers: final norm, and the head where it is a tensor of its own."""
    yield from _norm("final_norm", model.hidden_size, bias=model.arch == "gpt")
    if own_head:
        yield Parameter("head.weight", (model.vocab_size, model.hidden_size), 0)


def parameter_count(model: ModelSpec) -> int:
    """Trainable parameters of the whole model, a tied table counted once.

    Exact: GPT-2 124,439,808; Llama-3 8B 8,030,261,248; Mixtral 8x7B 46,702,792,704.
    """
    dense, moe = _layer_kinds(model)
    layers = dense * _count(layer_parameters(model)) + moe * _count(layer_parameters(model, moe=True))
    return layers + _ends(model)


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters one token meets: all but the experts it is not sent to. Mixtral 8x7B: 12,879,925,248."""
    _, moe_layers = _layer_kinds(model)
    if model.moe is None:
        return parameter_count(model)
    expert = sum(p.numel for p in layer_parameters(model, moe=True) if p.is_expert) // model.moe.num_experts
    return parameter_count(model) - moe_layers * expert * (model.moe.num_experts - model.moe.experts_per_token)


def _layer_kinds(model: ModelSpec) -> tuple[int, int]:
    """(layers with one MLP, layers with experts)"""
    dense = model.num_layers if model.moe is None else min(model.moe.dense_layers, model.num_layers)
    return dense, model.num_layers - dense


def _count(parameters: tuple[Parameter, ...]) -> int:
    return sum(p.numel for p in parameters)


def _ends(model: ModelSpec) -> int:
    return _count((*embedding_parameters(model), *head_parameters(model, own_head=not model.tied_embeddings)))


def stage_units(model: ModelSpec, layers: range, *, first: bool, last: bool) -> list[Unit]:
    """The units of one pipeline stage, whole tensors (not divided by tp): each layer, then the root.

    The root holds what lies outside the layers. With tied embeddings the head reuses the table when both
    ends are on the same stage, and is a copy otherwise.
    """
    units = [Unit(f"layers.{i}", layer_parameters(model, moe=is_moe_layer(model, i))) for i in layers]
    root: list[Parameter] = []
    if first:
        root += embedding_parameters(model)
    if last:
        root += head_parameters(model, own_head=not (model.tied_embeddings and first))
    if root:
        units.append(Unit("root", tuple(root)))
    return units


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
