"""Describe the layers of the model families that a Hugging Face config.json names.

The classes of transformers and, for families without one, the code that is published with the weights define which
biases and norms a family has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Flag = bool | str  # fixed, or the name of the config field that has the value


class Family(NamedTuple):
    """Layers of a model family. The defaults are those of Llama without biases.

    Attributes:
        names: Names of fields in the config that differ from those of Llama.
        defaults: Values of fields that a config may omit.
        experts: Names of the fields of the experts, if the family has some.
        unused_prefix: Start of the names of fields that describe layers without attention, which have no effect.
    """

    gated: bool = True
    positions: Literal["rope", "learned", "none"] = "rope"
    norm: Literal["rms", "layer", "none"] = "rms"
    num_norms: Literal[1, 2, 4] = 2
    parallel: Flag = False
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    query_norm: Literal["none", "head", "full"] = "none"
    query_norm_flag: Flag = True
    embedding_norm: bool = False
    attention_sinks: bool = False
    latent_attention: bool = False
    window: Literal["none", "all", "optional", "pattern"] = "none"
    experts: ExpertNames | None = None
    unused_prefix: str = "\0"
    names: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}


class ExpertNames(NamedTuple):
    """Names of the config fields of the experts, and the parts that all configs of a family have."""

    number: str
    size: str = "moe_intermediate_size"
    shared_number: str | None = None
    shared_size: str | None = None
    shared_gate: bool = False
    dense_layers: str | None = None
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: bool = False


_TIED = {"tie_word_embeddings": True}
_GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_LLAMA = Family(**_ATTENTION_BIAS, mlp_bias="mlp_bias")
_GPT = Family(gated=False, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True)
_QWEN3 = Family(
    **_ATTENTION_BIAS,
    query_norm="head",
    window="optional",
    defaults={"head_dim": 128},
)
_GEMMA = Family(**_ATTENTION_BIAS, defaults={**_TIED, "head_dim": 256})
_GEMMA3 = _GEMMA._replace(
    num_norms=4,
    query_norm="head",
    window="pattern",
    defaults={
        **_TIED,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "sliding_window": 4096,
    },
)
_OLMO2 = Family(**_ATTENTION_BIAS, query_norm="full")
_COHERE = Family(**_ATTENTION_BIAS, norm="rms", num_norms=1, parallel=True, defaults=_TIED)
_GRANITE = Family(**_ATTENTION_BIAS, mlp_bias="mlp_bias")
_GRANITE_MOE = ExpertNames("num_local_experts", "intermediate_size")
_DEEPSEEK = ExpertNames("n_routed_experts", shared_number="n_shared_experts", dense_layers="first_k_dense_replace")
_DEEPSEEK_V3 = Family(latent_attention=True, experts=_DEEPSEEK._replace(router_bias=True))
_GLM = Family(qkv_bias="attention_bias")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(window="all"),
    "mixtral": Family(window="all", experts=ExpertNames("num_local_experts", "intermediate_size")),
    "qwen2": Family(qkv_bias=True, window="optional"),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        window="optional",
        experts=ExpertNames("num_experts", shared_size="shared_expert_intermediate_size", shared_gate=True),
        defaults={"qkv_bias": True},
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3._replace(experts=ExpertNames("num_experts")),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        num_norms=4,
        window="pattern",
        defaults={**_TIED, "head_dim": 256, "sliding_window_pattern": 2, "sliding_window": 4096},
    ),
    "gemma3_text": _GEMMA3,
    "phi": _GPT._replace(num_norms=1, parallel=True, head_bias=True),
    "phi3": Family(**_ATTENTION_BIAS, window="all"),
    "phimoe": Family(
        **_ATTENTION_BIAS,
        norm="layer",
        head_bias="lm_head_bias",
        window="all",
        experts=ExpertNames("num_local_experts", "intermediate_size"),
    ),
    "olmo": Family(**_ATTENTION_BIAS, norm="none"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(window="pattern", defaults={"sliding_window_pattern": 4, "sliding_window": 4096}),
    "olmoe": _OLMO2._replace(experts=ExpertNames("num_experts", "intermediate_size")),
    "gpt2": _GPT._replace(positions="learned", names=_GPT2_NAMES, defaults=_TIED),
    "gpt_bigcode": _GPT._replace(positions="learned", names=_GPT2_NAMES, defaults={**_TIED, "multi_query": True}),
    "gpt_neox": _GPT._replace(
        **_ATTENTION_BIAS,
        parallel="use_parallel_residual",
        defaults={"attention_bias": True, "use_parallel_residual": True},
    ),
    "bloom": _GPT._replace(
        positions="none",
        embedding_norm=True,
        names={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        defaults={**_TIED, "seq_length": 2048},
    ),
    # `planner.facts.hugging_face` adds the three layers of Falcon, which depend on several fields.
    "falcon": Family(
        gated=False,
        norm="layer",
        qkv_bias="bias",
        out_bias="bias",
        mlp_bias="bias",
        names={"num_hidden_layers": "num_hidden_layers", "intermediate_size": "ffn_hidden_size"},
        defaults={**_TIED, "max_position_embeddings": 2048},
    ),
    "glm": _GLM,
    "glm4": _GLM._replace(num_norms=4),
    "glm4_moe": _GLM._replace(
        query_norm="head", query_norm_flag="use_qk_norm", experts=_DEEPSEEK._replace(router_bias=True)
    ),
    "chatglm": Family(
        qkv_bias="add_qkv_bias",
        out_bias="add_bias_linear",
        mlp_bias="add_bias_linear",
        names={
            "num_hidden_layers": "num_layers",
            "num_key_value_heads": "multi_query_group_num",
            "intermediate_size": "ffn_hidden_size",
            "vocab_size": "padded_vocab_size",
            "max_position_embeddings": "seq_length",
            "head_dim": "kv_channels",
        },
    ),
    "minicpm": Family(defaults=_TIED),
    "minicpm3": Family(latent_attention=True, defaults=_TIED),
    "deepseek": Family(experts=_DEEPSEEK),
    "deepseek_v2": Family(latent_attention=True, experts=_DEEPSEEK),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": Family(
        **_ATTENTION_BIAS,
        attention_sinks=True,
        window="pattern",
        experts=ExpertNames(
            "num_local_experts", "intermediate_size", router_bias=True, expert_bias=True, swiglu_limit=True
        ),
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window_pattern": 2, "sliding_window": 128},
    ),
    "nemotron": Family(gated=False, norm="layer", **_ATTENTION_BIAS, mlp_bias="mlp_bias"),
    "internlm": Family(qkv_bias="bias", out_bias="bias", defaults={"bias": True}),
    "internlm2": Family(qkv_bias="bias", out_bias="bias"),
    "internlm3": Family(qkv_bias="qkv_bias", out_bias="bias", mlp_bias="bias"),
    "baichuan": Family(),
    "granite": _GRANITE,
    "granitemoe": Family(**_ATTENTION_BIAS, experts=_GRANITE_MOE),
    "granitemoeshared": Family(
        **_ATTENTION_BIAS, experts=_GRANITE_MOE._replace(shared_size="shared_intermediate_size")
    ),
    "granitemoehybrid": Family(
        **_ATTENTION_BIAS,
        experts=_GRANITE_MOE._replace(shared_size="shared_intermediate_size"),
        unused_prefix="mamba_",
    ),
    "smollm3": _LLAMA._replace(window="optional"),
    "starcoder2": Family(
        gated=False,
        norm="layer",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        window="all",
        defaults={**_TIED, "use_bias": True},
    ),
    "cohere": _COHERE._replace(query_norm="full", query_norm_flag="use_qk_norm"),
    "cohere2": _COHERE._replace(
        window="pattern", defaults={**_TIED, "sliding_window_pattern": 4, "sliding_window": 4096}
    ),
}

# Families with layers whose cost the planner does not predict, and the name of that layer.
OTHER_LAYERS: dict[str, str] = {
    "bamba": "mamba",
    "falcon_h1": "mamba",
    "falcon_mamba": "mamba",
    "jamba": "mamba",
    "lfm2": "conv",
    "mamba": "mamba",
    "mamba2": "mamba",
    "minimax": "linear_attention",
    "nemotron_h": "mamba",
    "qwen3_next": "linear_attention",
    "recurrent_gemma": "recurrent",
    "rwkv": "recurrent",
    "zamba": "mamba",
    "zamba2": "mamba",
}

# Fields that change no parameter, no FLOP, and no byte of training.
_NAMES_WITHOUT_COST = """
    _attn_implementation _attn_implementation_autoset _from_model_config _name_or_path activation_function
    apply_query_key_layer_scaling apply_residual_connection_post_layernorm architectures
    attention_dropout attention_multiplier attention_probs_dropout_prob attention_softcap attention_softmax_in_fp32
    attn_dropout attn_implementation attn_logit_softcapping attn_pdrop auto_map aux_loss_alpha bias_dropout_fusion
    bos_token_id chunk_size_feed_forward classifier_dropout clip_qkv compression_config decoder_start_token_id
    dim_model_base dtype embd_pdrop embedding_dropout embedding_multiplier eos_token_id ep_size ffn_dropout
    final_logit_softcapping fp32_residual_connection gradient_checkpointing hidden_act hidden_activation
    hidden_dropout hidden_dropout_prob id2label initial_context_length initializer_factor initializer_range
    input_jitter_noise is_decoder is_llama_config label2id language layer_norm_eps layer_norm_epsilon layer_switch
    layernorm_epsilon logit_scale logits_scaling masked_softmax_fusion max_window_layers mlp_type model_max_length
    model_type mup_denominator n_ctx n_embed n_group no_rope_layer_interval no_rope_layers norm_eps norm_epsilon
    norm_topk_prob norm_type num_nextn_predict_layers offset_alibi order_of_interleaved_layers
    original_max_position_embeddings original_rope output_attentions output_hidden_states output_router_logits
    pad_token_id partial_rotary_factor position_embedding_type post_layer_norm pretraining_tp problem_type
    pruned_heads quantization_config query_pre_attn_scalar reorder_and_upcast_attn resid_dropout resid_pdrop
    residual_dropout residual_multiplier return_dict rms_norm_eps rmsnorm rope_interleave rope_interleaved
    rope_local_base_freq rope_percent rope_percentage rope_ratio rope_theta rotary_dim rotary_emb_base rotary_pct
    routed_scaling_factor router_aux_loss_coef router_jitter_noise router_z_loss_coef scale_attn_by_inverse_layer_idx
    scale_attn_weights scale_depth scale_emb scoring_func sep_token_id seq_aux skip_bias_add skip_bias_add_qkv
    sliding_window slow_but_exact summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params tie_encoder_decoder tokenizer_class tokenizer_mode topk_group
    topk_group_size topk_method torch_dtype torchscript transformers.js_config transformers_version unk_token_id
    use_bidirectional_attention use_cache use_embedding_sharing use_gated_activation use_logit_softcapping use_mambapy
    use_parallel_block use_parallel_embedding use_parallel_residual use_sliding_window z_loss_weight
"""
FIELDS_WITHOUT_COST = frozenset(_NAMES_WITHOUT_COST.split())
