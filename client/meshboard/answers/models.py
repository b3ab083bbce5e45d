"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class BlockSpec(TypedDict):
    """Differences of a published model from the usual layer of its `arch`. A null field follows `arch`.

    The planner supports these fields, and the trainer does not.
    """

    attention_sinks: NotRequired[bool]
    """learned logit per head in the softmax (gpt-oss)"""
    embedding_norm: NotRequired[bool]
    """norm after the embedding (BLOOM)"""
    head_bias: NotRequired[bool]
    """bias of the output layer"""
    mlp_bias: NotRequired[bool | None]
    """biases of the MLP; default true for gpt"""
    norm_bias: NotRequired[bool | None]
    """norms have a bias; default true for gpt"""
    norm_weight: NotRequired[bool]
    """norms have a weight (not in OLMo 1)"""
    num_norms: NotRequired[Literal[1, 2, 4]]
    """norms of the hidden states per layer"""
    out_bias: NotRequired[bool | None]
    """bias of the attention output; default true for gpt"""
    parallel: NotRequired[bool]
    """attention and MLP have the same input (GPT-NeoX)"""
    positions: NotRequired[Literal["learned", "rope", "none"] | None]
    """position encoding; default learned for gpt, and rope for llama"""
    qkv_bias: NotRequired[bool | None]
    """biases of queries, keys, and values; default true for gpt"""
    query_norm: NotRequired[Literal["none", "head", "full"]]
    """norm of queries and keys: none, one weight for all heads (head), or a weight per head (full)"""
    windowed_layers: NotRequired[int | None]
    """number of layers with sliding_window; default every second layer"""


class MlaSpec(TypedDict):
    """Multi-head latent attention with low-rank queries, keys, and values (DeepSeek-V2, arXiv 2405.04434)."""

    q_rank: int
    """rank of compressed queries; 0 if queries are not compressed"""
    kv_rank: int
    """rank of compressed keys and values"""
    nope_head_dim: int
    """dimensions of each query and key head without RoPE"""
    rope_head_dim: int
    """dimensions of each query and key head with RoPE; all heads share these key dimensions"""
    value_head_dim: int
    """value size per head"""


class MoeSpec(TypedDict):
    """Mixture of experts: a router and several MLPs per layer, except in the first `dense_layers`."""

    num_experts: int
    """routed experts per layer"""
    experts_per_token: int
    """number of experts that process each token (top-k)"""
    expert_ffn_hidden_size: int
    """hidden size of each expert's MLP"""
    balance_loss: NotRequired[float]
    """weight of the load-balancing loss"""
    capacity_factor: NotRequired[float | None]
    """maximum tokens per expert, as a multiple of an even split; no limit by default"""
    dense_layers: NotRequired[int]
    """number of layers at the start of the model with a dense MLP"""
    expert_bias: NotRequired[bool]
    """biases in the linear layers of experts (gpt-oss)"""
    router_bias: NotRequired[bool]
    """add a bias per expert to the router scores (DeepSeek-V3)"""
    shared_experts: NotRequired[int]
    """shared experts, which process every token"""
    shared_ffn_hidden_size: NotRequired[int | None]
    """hidden size of the MLP of all shared experts; default shared_experts x expert_ffn_hidden_size"""
    shared_gate: NotRequired[bool]
    """scale the output of the shared experts by a gate (Qwen2-MoE)"""
    swiglu_limit: NotRequired[float | None]
    """clamp limit of the expert's gate and up outputs (gpt-oss: 7)"""


class RopeScaling(TypedDict):
    """RoPE scaling of Llama 3.1. Stretches long wavelengths, keeps short ones, and blends between them.

    Wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched by `factor`. Wavelengths below
    `original_max_seq_len / high_freq_factor` tokens are unchanged.
    """

    factor: float
    """factor by which long RoPE wavelengths are stretched"""
    original_max_seq_len: int
    """maximum sequence length before RoPE scaling (tokens)"""
    high_freq_factor: NotRequired[float]
    """wavelengths below original_max_seq_len / high_freq_factor are unchanged"""
    low_freq_factor: NotRequired[float]
    """wavelengths above original_max_seq_len / low_freq_factor are stretched"""


class ModelSpec(TypedDict):
    """Shape of a decoder-only transformer.

    gpt has LayerNorm, GELU, learned positions, and biases. llama has RMSNorm, RoPE, SwiGLU, GQA, and no biases.
    """

    arch: NotRequired[Literal["gpt", "llama"]]
    """block type: gpt or llama"""
    block: NotRequired[BlockSpec | None]
    ffn_hidden_size: NotRequired[int]
    """hidden size of the MLP"""
    head_dim: NotRequired[int | None]
    """size of each attention head; default hidden_size / num_heads"""
    hidden_size: NotRequired[int]
    """hidden size"""
    max_seq_len: NotRequired[int]
    """longest sequence (tokens)"""
    mla: NotRequired[MlaSpec | None]
    moe: NotRequired[MoeSpec | None]
    num_heads: NotRequired[int]
    """attention heads per layer"""
    num_kv_heads: NotRequired[int]
    """key/value heads per layer; equal to num_heads without GQA"""
    num_layers: NotRequired[int]
    """transformer layers"""
    preset: NotRequired[
        Literal[
            "gpt-tiny",
            "gpt-mini",
            "nanogpt",
            "llama-tiny",
            "llama-mini",
            "gpt2",
            "gpt2-medium",
            "gpt2-large",
            "gpt2-xl",
            "gpt3-125m",
            "gpt3-350m",
            "gpt3-760m",
            "gpt3-1.3b",
            "gpt3-2.7b",
            "gpt3-6.7b",
            "gpt3-13b",
            "gpt3-175b",
            "megatron-1.7b",
            "megatron-3.6b",
            "megatron-7.5b",
            "megatron-18b",
            "megatron-39b",
            "megatron-76b",
            "megatron-145b",
            "megatron-175b",
            "megatron-310b",
            "megatron-530b",
            "megatron-1t",
            "megatron-22b",
            "llama2-7b",
            "llama2-13b",
            "llama2-70b",
            "llama3-1b",
            "llama3-3b",
            "llama3-8b",
            "llama3-70b",
            "llama3-405b",
            "mixtral-tiny",
            "mixtral-8x7b",
            "mixtral-8x22b",
            "deepseek-v3",
            "bloom-176b",
            "gpt-neox-20b",
            "nemotron-4-340b",
            "glm-130b",
        ]
        | None
    ]
    rope_base: NotRequired[float]
    """RoPE base (llama)"""
    rope_scaling: NotRequired[RopeScaling | None]
    """RoPE scaling as in Llama 3.1"""
    sliding_window: NotRequired[int | None]
    """attention window of every second layer (tokens); full attention by default"""
    tied_embeddings: NotRequired[bool]
    """the output layer shares the weights of the embedding"""
    vocab_size: NotRequired[int]
    """vocabulary size; byte-level data needs 256"""


class SizedModel(TypedDict):
    """Shape of a decoder-only transformer.

    gpt has LayerNorm, GELU, learned positions, and biases. llama has RMSNorm, RoPE, SwiGLU, GQA, and no biases.
    """

    arch: Literal["gpt", "llama"]
    """block type: gpt or llama"""
    num_layers: int
    """transformer layers"""
    hidden_size: int
    """hidden size"""
    num_heads: int
    """attention heads per layer"""
    num_kv_heads: int
    """key/value heads per layer; equal to num_heads without GQA"""
    ffn_hidden_size: int
    """hidden size of the MLP"""
    vocab_size: int
    """vocabulary size; byte-level data needs 256"""
    max_seq_len: int
    """longest sequence (tokens)"""
    tied_embeddings: bool
    """the output layer shares the weights of the embedding"""
    block: NotRequired[BlockSpec | None]
    head_dim: NotRequired[int | None]
    """size of each attention head; default hidden_size / num_heads"""
    mla: NotRequired[MlaSpec | None]
    moe: NotRequired[MoeSpec | None]
    preset: NotRequired[str | None]
    """model preset that sets the default sizes"""
    rope_base: NotRequired[float]
    """RoPE base (llama)"""
    rope_scaling: NotRequired[RopeScaling | None]
    """RoPE scaling as in Llama 3.1"""
    sliding_window: NotRequired[int | None]
    """attention window of every second layer (tokens); full attention by default"""
