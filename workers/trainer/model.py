"""GPT and Llama decoders, as much of them as one stage and one tp rank hold.

Parameter names and shapes are those of `planner.models`: the planner's arithmetic is about these very tensors.
Hidden states are (batch, seq[/tp], hidden) in the compute type; norms and the loss run in fp32.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import nn

from planner.models import Parameter, Unit
from planner.spec import ModelSpec
from workers.trainer.tensor_parallel import TensorParallel

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0
INIT_STD = 0.02


class Linear(nn.Module):
    """y = x W^T [+ b], computed in the type of x. weight (out, in)."""

    def __init__(self, out_size: int, in_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Without the bias, which a row-parallel product adds only after the sum."""
        return F.linear(x, self.weight.to(x.dtype))

    def add_bias(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias is None else x + self.bias.to(x.dtype)


class Norm(nn.Module):
    """LayerNorm with bias, or RMSNorm without."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self.bias is None:
            return F.rms_norm(x.float(), shape, self.weight.float(), NORM_EPS).to(x.dtype)
        return F.layer_norm(x.float(), shape, self.weight.float(), self.bias.float(), NORM_EPS).to(x.dtype)


class Table(nn.Module):
    """Rows looked up by index."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (RoFormer 2104.09864 eq 34), halves convention. x (batch, heads, seq, head size)."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float32), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Causal self-attention over this rank's heads; each key/value head serves num_heads / num_kv_heads queries."""

    def __init__(self, model: ModelSpec, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = model.hidden_size // model.num_heads
        self.rope = model.arch == "llama"
        h, bias = model.hidden_size, model.arch == "gpt"
        kv = model.num_kv_heads * self.head_dim // tp.degree
        self.q = Linear(h // tp.degree, h, bias)
        self.k = Linear(kv, h, bias)
        self.v = Linear(kv, h, bias)
        self.out = Linear(h, h // tp.degree, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> partial sums of the output, (batch, seq, hidden)"""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.rope:
            q, k = rotate(q), rotate(k)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.out.partial(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """GELU for gpt, SwiGLU for llama, over this rank's columns."""

    def __init__(self, model: ModelSpec, tp: TensorParallel) -> None:
        super().__init__()
        h, f, bias = model.hidden_size, model.ffn_hidden_size // tp.degree, model.arch == "gpt"
        self.gate = Linear(f, h, bias) if model.arch == "llama" else None
        self.up = Linear(f, h, bias)
        self.down = Linear(h, f, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) -> partial sums of the output, (batch, seq, hidden)"""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down.partial(inner)


class Block(nn.Module):
    """Pre-norm transformer layer. Each half enters tp once and leaves it once."""

    def __init__(self, model: ModelSpec, tp: TensorParallel) -> None:
        super().__init__()
        bias = model.arch == "gpt"
        self.tp = tp
        self.attention_norm = Norm(model.hidden_size, bias)
        self.attention = Attention(model, tp)
        self.mlp_norm = Norm(model.hidden_size, bias)
        self.mlp = Mlp(model, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.tp.leave(self.attention(self.tp.enter(self.attention_norm(x))))
        x = x + self.attention.out.add_bias(attended)
        fed = self.tp.leave(self.mlp(self.tp.enter(self.mlp_norm(x))))
        return x + self.mlp.down.add_bias(fed)


class Decoder(nn.Module):
    """One stage: the layers in `layers`, the embedding on the first stage, final norm and head on the last.

    Absent parts are None. `layers` is keyed by the layer's number in the whole model.
    """

    def __init__(
        self, model: ModelSpec, layers: range, tp: TensorParallel, dtype: torch.dtype, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        gpt, h = model.arch == "gpt", model.hidden_size
        own_head = last and not (model.tied_embeddings and first)
        self.tp, self.dtype = tp, dtype
        self.first, self.last = first, last
        self.embedding = Table(model.vocab_size // tp.degree, h) if first else None
        self.positions = Table(model.max_seq_len, h) if first and gpt else None
        self.layers = nn.ModuleDict({str(index): Block(model, tp) for index in layers})
        self.final_norm = Norm(h, gpt) if last else None
        self.head = Table(model.vocab_size // tp.degree, h) if own_head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, seq) on the first stage, hidden states otherwise -> hidden states, or logits on the last."""
        if self.embedding is not None:
            seq_len = x.shape[1]
            x = self.tp.embed(x, self.embedding.weight.to(self.dtype))
            if self.positions is not None:
                rows = self.tp.sequence_part(self.positions.weight[:seq_len], 0)
                x = x + rows.to(self.dtype)
        for layer in self.layers.values():
            x = layer(x)
        if self.final_norm is None:
            return x
        table = self.head if self.head is not None else self.embedding
        assert table is not None
        return F.linear(self.tp.enter(self.final_norm(x)), table.weight.to(self.dtype))


def unit_modules(decoder: Decoder, unit: Unit) -> list[nn.Module]:
    """The modules whose parameters `unit` lists: one layer, or what lies outside the layers."""
    if unit.name != "root":
        return [decoder.layers[unit.name.removeprefix("layers.")]]
    return [m for name, m in decoder.named_children() if name != "layers"]


def unit_parameter(decoder: Decoder, unit: Unit, parameter: Parameter) -> nn.Parameter:
    """The tensor of this decoder that `parameter` of `unit` describes."""
    prefix = "" if unit.name == "root" else f"{unit.name}."
    return decoder.get_parameter(prefix + parameter.name)


def initialise(decoder: Decoder, unit: Unit, model: ModelSpec, tp: TensorParallel, seed: int) -> None:
    """Fill a unit's parameters with their part of the whole tensors, drawn from (seed, name) alone.

    So all layouts start from the same model with nothing sent. `unit` has whole shapes.
    Weights: normal, std 0.02, products that end a residual branch divided by sqrt(2 layers) (GPT-2 section 2.3).
    """
    for parameter in unit.parameters:
        name = parameter.name if unit.name == "root" else f"{unit.name}.{parameter.name}"
        with torch.no_grad():
            target = unit_parameter(decoder, unit, parameter)
            target.copy_(_part(_whole(parameter, name, model, seed), parameter, tp))


def _whole(parameter: Parameter, name: str, model: ModelSpec, seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape)
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    if name == "head.weight" and model.tied_embeddings:
        name = "embedding.weight"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
    std = INIT_STD / (2 * model.num_layers) ** 0.5 if ends_branch else INIT_STD
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)


def _part(whole: torch.Tensor, parameter: Parameter, tp: TensorParallel) -> torch.Tensor:
    if parameter.tp_dim is None or tp.degree == 1:
        return whole
    return whole.chunk(tp.degree, parameter.tp_dim)[tp.index]
