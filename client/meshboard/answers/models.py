"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class MlaSpec(TypedDict):
    """Multi-head latent attention (DeepSeek-V2 2405.04434 section 2.1): low-rank queries, keys and values."""

    q_rank: int
    """size that queries are compressed to"""
    kv_rank: int
    """size that keys and values are compressed to, what a cache would hold"""
    nope_head_dim: int
    """query/key size a head without position"""
    rope_head_dim: int
    """query/key size with position; the key's is shared by heads"""
    value_head_dim: int
    """size of a value a head"""


class MoeSpec(TypedDict):
    """Mixture of experts: the MLP of every layer but the first `dense_layers`, several times over with a router."""

    num_experts: int
    """routed experts a layer"""
    experts_per_token: int
    """experts a token is sent to (top-k)"""
    expert_ffn_hidden_size: int
    """size inside an expert's MLP"""
    balance_loss: NotRequired[float]
    """weight of the load-balancing loss"""
    capacity_factor: NotRequired[float | None]
    """tokens an expert takes of a sequence, over an even share"""
    dense_layers: NotRequired[int]
    """first layers with a dense MLP"""
    expert_bias: NotRequired[bool]
    """each expert's products add a bias (gpt-oss)"""
    router_bias: NotRequired[bool]
    """a bias an expert in the router (DeepSeek-V3)"""
    shared_experts: NotRequired[int]
    """experts that every token visits"""
    swiglu_limit: NotRequired[float | None]
    """what an expert's gate and up are clamped to (gpt-oss: 7)"""


class RopeScaling(TypedDict):
    """Llama 3.1's stretch of rotary positions: slow turns are slowed by `factor`, fast ones kept, between them mixed.

    A turn is slow when it is longer than `original_max_seq_len / low_freq_factor` tokens, fast when shorter than
    `original_max_seq_len / high_freq_factor`.
    """

    factor: float
    """by which slow turns are slowed"""
    original_max_seq_len: int
    """tokens of a sequence before the stretch"""
    high_freq_factor: NotRequired[float]
    """turns shorter than the original over this are fast"""
    low_freq_factor: NotRequired[float]
    """turns longer than the original over this are slow"""


class ModelSpec(TypedDict):
    """Shape of a decoder-only transformer.

    gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, RoPE, SwiGLU, GQA, no biases.
    """

    arch: NotRequired[Literal["gpt", "llama"]]
    """the block: gpt or llama, as said above"""
    ffn_hidden_size: NotRequired[int]
    """size inside the MLP"""
    head_dim: NotRequired[int | None]
    """size of a head where it is not hidden_size / num_heads"""
    hidden_size: NotRequired[int]
    """numbers that stand for a token between layers"""
    max_seq_len: NotRequired[int]
    """tokens of the longest sequence"""
    mla: NotRequired[MlaSpec | None]
    moe: NotRequired[MoeSpec | None]
    num_heads: NotRequired[int]
    """attention heads a layer"""
    num_kv_heads: NotRequired[int]
    """equal to num_heads without GQA"""
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
        ]
        | None
    ]
    rope_base: NotRequired[float]
    """base of rotary positions (llama)"""
    rope_scaling: NotRequired[RopeScaling | None]
    """rotary positions stretched as Llama 3.1's"""
    sliding_window: NotRequired[int | None]
    """tokens that queries of every second layer see; all by default"""
    tied_embeddings: NotRequired[bool]
    """the head is the embedding table"""
    vocab_size: NotRequired[int]
    """byte-level data needs 256"""


class SizedModel(TypedDict):
    """Shape of a decoder-only transformer.

    gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, RoPE, SwiGLU, GQA, no biases.
    """

    arch: Literal["gpt", "llama"]
    """the block: gpt or llama, as said above"""
    num_layers: int
    """transformer layers"""
    hidden_size: int
    """numbers that stand for a token between layers"""
    num_heads: int
    """attention heads a layer"""
    num_kv_heads: int
    """equal to num_heads without GQA"""
    ffn_hidden_size: int
    """size inside the MLP"""
    vocab_size: int
    """byte-level data needs 256"""
    max_seq_len: int
    """tokens of the longest sequence"""
    tied_embeddings: bool
    """the head is the embedding table"""
    head_dim: NotRequired[int | None]
    """size of a head where it is not hidden_size / num_heads"""
    mla: NotRequired[MlaSpec | None]
    moe: NotRequired[MoeSpec | None]
    preset: NotRequired[str | None]
    """preset these sizes come from"""
    rope_base: NotRequired[float]
    """base of rotary positions (llama)"""
    rope_scaling: NotRequired[RopeScaling | None]
    """rotary positions stretched as Llama 3.1's"""
    sliding_window: NotRequired[int | None]
    """tokens that queries of every second layer see; all by default"""
