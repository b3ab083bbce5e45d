"""Define the optional parts of a model spec: experts, latent attention, RoPE scaling, and differences of layers."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from planner.facts.validation import StrictModel

Arch = Literal["gpt", "llama"]
Positions = Literal["learned", "rope", "none"]


class MoeSpec(StrictModel):
    """Mixture of experts: a router and several MLPs per layer, except in the first `dense_layers`."""

    num_experts: int = Field(ge=2, le=4096, description="routed experts per layer")
    experts_per_token: int = Field(ge=1, le=256, description="number of experts that process each token (top-k)")
    expert_ffn_hidden_size: int = Field(ge=1, le=4_194_304, description="hidden size of each expert's MLP")
    shared_experts: int = Field(default=0, ge=0, le=64, description="shared experts, which process every token")
    shared_ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        le=4_194_304,
        description="hidden size of the MLP of all shared experts; default shared_experts x expert_ffn_hidden_size",
    )
    shared_gate: bool = Field(default=False, description="scale the output of the shared experts by a gate (Qwen2-MoE)")
    dense_layers: int = Field(
        default=0, ge=0, le=1024, description="number of layers at the start of the model with a dense MLP"
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        le=1024,
        description="maximum tokens per expert, as a multiple of an even split; no limit by default",
    )
    balance_loss: float = Field(default=0.01, ge=0, le=10, description="weight of the load-balancing loss")
    router_bias: bool = Field(default=False, description="add a bias per expert to the router scores (DeepSeek-V3)")
    expert_bias: bool = Field(default=False, description="biases in the linear layers of experts (gpt-oss)")
    swiglu_limit: float | None = Field(
        default=None, gt=0, le=1e6, description="clamp limit of the expert's gate and up outputs (gpt-oss: 7)"
    )

    @property
    def shared_size(self) -> int:
        """Return the hidden size of the MLP that all shared experts form together."""
        return self.shared_ffn_hidden_size or self.shared_experts * self.expert_ffn_hidden_size


class MlaSpec(StrictModel):
    """Multi-head latent attention with low-rank queries, keys, and values (DeepSeek-V2, arXiv 2405.04434)."""

    q_rank: int = Field(ge=0, le=65536, description="rank of compressed queries; 0 if queries are not compressed")
    kv_rank: int = Field(ge=1, le=65536, description="rank of compressed keys and values")
    nope_head_dim: int = Field(ge=1, le=4096, description="dimensions of each query and key head without RoPE")
    rope_head_dim: int = Field(
        ge=2,
        le=4096,
        description="dimensions of each query and key head with RoPE; all heads share these key dimensions",
    )
    value_head_dim: int = Field(ge=1, le=4096, description="value size per head")


class RopeScaling(StrictModel):
    """RoPE scaling of Llama 3.1. Stretches long wavelengths, keeps short ones, and blends between them.

    Wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched by `factor`.
    Wavelengths below `original_max_seq_len / high_freq_factor` tokens are unchanged.
    """

    factor: float = Field(gt=0, le=1e6, description="factor by which long RoPE wavelengths are stretched")
    low_freq_factor: float = Field(
        default=1.0, gt=0, le=1e6, description="wavelengths above original_max_seq_len / low_freq_factor are stretched"
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, le=1e6, description="wavelengths below original_max_seq_len / high_freq_factor are unchanged"
    )
    original_max_seq_len: int = Field(
        ge=1, le=16_777_216, description="maximum sequence length before RoPE scaling (tokens)"
    )


class BlockSpec(StrictModel):
    """Differences of a published model from the usual layer of its `arch`. A null field follows `arch`.

    The planner supports these fields, and the trainer does not.
    """

    positions: Positions | None = Field(
        default=None, description="position encoding; default learned for gpt, and rope for llama"
    )
    norm_weight: bool = Field(default=True, description="norms have a weight (not in OLMo 1)")
    norm_bias: bool | None = Field(default=None, description="norms have a bias; default true for gpt")
    num_norms: Literal[1, 2, 4] = Field(default=2, description="norms of the hidden states per layer")
    parallel: bool = Field(default=False, description="attention and MLP have the same input (GPT-NeoX)")
    query_norm: Literal["none", "head", "full"] = Field(
        default="none",
        description="norm of queries and keys: none, one weight for all heads (head), or a weight per head (full)",
    )
    qkv_bias: bool | None = Field(default=None, description="biases of queries, keys, and values; default true for gpt")
    out_bias: bool | None = Field(default=None, description="bias of the attention output; default true for gpt")
    mlp_bias: bool | None = Field(default=None, description="biases of the MLP; default true for gpt")
    head_bias: bool = Field(default=False, description="bias of the output layer")
    embedding_norm: bool = Field(default=False, description="norm after the embedding (BLOOM)")
    attention_sinks: bool = Field(default=False, description="learned logit per head in the softmax (gpt-oss)")
    windowed_layers: int | None = Field(
        default=None, ge=0, le=1024, description="number of layers with sliding_window; default every second layer"
    )


@lru_cache(maxsize=256)
def resolve_block(arch: Arch, block: BlockSpec | None) -> BlockSpec:
    """Return a block with a value in every field that follows `arch`."""
    gpt, block = arch == "gpt", block or BlockSpec()
    defaults = {name: gpt for name in ("norm_bias", "qkv_bias", "out_bias", "mlp_bias") if getattr(block, name) is None}
    positions = block.positions or ("learned" if gpt else "rope")
    return block.model_copy(update={**defaults, "positions": positions})


def list_block_changes(block: BlockSpec) -> list[str]:
    """Return the fields of a block that differ from the usual layer of its `arch`, with their values."""
    return [f"{name} {value}" for name, value in block.model_dump(exclude_defaults=True, mode="json").items()]
