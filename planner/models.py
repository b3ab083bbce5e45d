"""Model presets, and the exact shape of every parameter of a decoder-only transformer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from planner.spec import ModelSpec


class Preset(NamedTuple):
    """A named shape and one line on what it is for."""

    model: ModelSpec
    description: str


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, seq: int, description: str) -> tuple[str, Preset]:
    model = ModelSpec(
        preset=name,
        arch="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocab,
        max_seq_len=seq,
        tied_embeddings=True,
    )
    return name, Preset(model, description)


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int, description: str
) -> tuple[str, Preset]:
    model = ModelSpec(
        preset=name,
        arch="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_seq_len=seq,
        tied_embeddings=False,
    )
    return name, Preset(model, description)


PRESETS: dict[str, Preset] = dict(
    [
        _gpt("gpt-tiny", 4, 128, 4, 256, 512, "Bytes in, bytes out; several steps a second on one CPU core a rank"),
        _gpt("gpt-mini", 8, 256, 8, 256, 1024, "A small GPT that still trains on a CPU"),
        _llama("llama-tiny", 4, 128, 8, 4, 352, 256, 2048, "The Llama block at CPU size"),
        _llama("llama-mini", 8, 256, 8, 4, 704, 256, 2048, "A small Llama that still trains on a CPU"),
        _gpt("gpt2", 12, 768, 12, 50257, 1024, "GPT-2 124M"),
        _gpt("gpt2-medium", 24, 1024, 16, 50257, 1024, "GPT-2 355M"),
        _gpt("gpt2-large", 36, 1280, 20, 50257, 1024, "GPT-2 774M"),
        _gpt("gpt2-xl", 48, 1600, 25, 50257, 1024, "GPT-2 1.5B"),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, "Llama 3 8B"),
    ]
)


def expand_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the sizes of a named preset; sizes given beside it win. Unknown names are left as they are.

    A size that differs from the preset's turns the model into a custom one: `preset` becomes None.
    """
    name = model.get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return dict(model)
    base = PRESETS[name].model.model_dump()
    changed = any(key in base and value != base[key] for key, value in model.items())
    return {**base, **model, "preset": None if changed else name}


class Parameter(NamedTuple):
    """One parameter tensor of the whole, unsharded model.

    `tp_dim` is the dim that tensor parallelism shards, None where it replicates.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def embedding_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """What the first stage holds beside its layers: token table, and learned positions for gpt."""
    yield Parameter("embedding.weight", (model.vocab_size, model.hidden_size), 0)
    if model.arch == "gpt":
        yield Parameter("positions.weight", (model.max_seq_len, model.hidden_size), None)


def layer_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """One transformer layer, in the trainer's registration order. Weights are (out, in)."""
    h, f = model.hidden_size, model.ffn_hidden_size
    kv = model.num_kv_heads * (h // model.num_heads)
    bias = model.arch == "gpt"

    def norm(name: str) -> Iterator[Parameter]:
        yield Parameter(f"{name}.weight", (h,), None)
        if bias:
            yield Parameter(f"{name}.bias", (h,), None)

    def linear(name: str, out_size: int, in_size: int, tp_dim: int) -> Iterator[Parameter]:
        yield Parameter(f"{name}.weight", (out_size, in_size), tp_dim)
        if bias:
            yield Parameter(f"{name}.bias", (out_size,), 0 if tp_dim == 0 else None)

    yield from norm("attention_norm")
    yield from linear("attention.q", h, h, 0)
    yield from linear("attention.k", kv, h, 0)
    yield from linear("attention.v", kv, h, 0)
    yield from linear("attention.out", h, h, 1)
    yield from norm("mlp_norm")
    if model.arch == "llama":
        yield from linear("mlp.gate", f, h, 0)
    yield from linear("mlp.up", f, h, 0)
    yield from linear("mlp.down", h, f, 1)


def head_parameters(model: ModelSpec, *, own_head: bool) -> Iterator[Parameter]:
    """What the last stage holds beside its layers: final norm, and the head where it is a tensor of its own."""
    yield Parameter("final_norm.weight", (model.hidden_size,), None)
    if model.arch == "gpt":
        yield Parameter("final_norm.bias", (model.hidden_size,), None)
    if own_head:
        yield Parameter("head.weight", (model.vocab_size, model.hidden_size), 0)


def parameter_count(model: ModelSpec) -> int:
    """Trainable parameters of the whole model, a tied table counted once.

    Exact: GPT-2 124,439,808; Llama-3 8B 8,030,261,248.
    """
    layer = sum(p.numel for p in layer_parameters(model))
    ends = [*embedding_parameters(model), *head_parameters(model, own_head=not model.tied_embeddings)]
    return model.num_layers * layer + sum(p.numel for p in ends)


class Unit(NamedTuple):
    """Parameters that data parallelism shards, gathers and reduces together."""

    name: str
    parameters: tuple[Parameter, ...]


def stage_units(model: ModelSpec, layers: range, *, first: bool, last: bool) -> list[Unit]:
    """The units of one pipeline stage, whole tensors (not divided by tp): each layer, then the root.

    The root holds what lies outside the layers. With tied embeddings the head reuses the table when both
    ends are on the same stage, and is a copy otherwise.
    """
    layer = tuple(layer_parameters(model))
    units = [Unit(f"layers.{index}", layer) for index in layers]
    root: list[Parameter] = []
    if first:
        root += embedding_parameters(model)
    if last:
        root += head_parameters(model, own_head=not (model.tied_embeddings and first))
    if root:
        units.append(Unit("root", tuple(root)))
    return units
