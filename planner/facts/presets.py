"""Define model presets and published layouts.

Sizes are from the paper or the published configuration.
Each published layout has a twin that runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.facts.famous_runs import FAMOUS_RUNS
from planner.facts.model_parts import BlockSpec, MlaSpec, MoeSpec, RopeScaling
from planner.facts.spec import DEFAULT_ROPE_BASE, ModelSpec


class ModelPreset(NamedTuple):
    """Model shape with a short description."""

    model: ModelSpec
    description: str


def _gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int, seq: int, description: str
) -> tuple[str, ModelPreset]:
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
    return name, ModelPreset(model, description)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    seq: int,
    description: str,
    *,
    tied: bool = False,
    rope: float = DEFAULT_ROPE_BASE,
    stretch: float | None = None,
    moe: MoeSpec | None = None,
    mla: MlaSpec | None = None,
) -> tuple[str, ModelPreset]:
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
        tied_embeddings=tied,
        rope_base=rope,
        rope_scaling=RopeScaling(factor=stretch, original_max_seq_len=8192) if stretch else None,
        moe=moe,
        mla=mla,
    )
    return name, ModelPreset(model, description)


def _with_block(
    name: str,
    description: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    seq: int,
    block: BlockSpec,
    *,
    tied: bool = True,
    kv_heads: int | None = None,
) -> tuple[str, ModelPreset]:
    """Return a model of arch gpt with other layers than GPT-3."""
    model = ModelSpec(
        preset=name,
        arch="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_seq_len=seq,
        tied_embeddings=tied,
        block=block,
    )
    return name, ModelPreset(model, description)


_BLOOM = BlockSpec(positions="none", embedding_norm=True)
_NEOX = BlockSpec(positions="rope", parallel=True)
_NEMOTRON = BlockSpec(positions="rope", qkv_bias=False, out_bias=False, mlp_bias=False)
_GPT3, _MEGATRON, _LLAMA2, _LLAMA3 = 50257, 51200, 32000, 128256
# 2407.21783 section 3.2. RoPE factors and Mixtral's base are from the published configurations.
_ROPE3, _MIXTRAL_ROPE = 500_000.0, 1_000_000.0

PRESETS: dict[str, ModelPreset] = dict(
    [
        # Sizes for a CPU.
        _gpt("gpt-tiny", 4, 128, 4, 256, 512, "Byte-level GPT that is fast with one CPU core per rank"),
        _gpt("gpt-mini", 8, 256, 8, 256, 1024, "Small GPT for CPU training"),
        _gpt("nanogpt", 6, 384, 6, 256, 256, "Byte-level model with the size of nanoGPT's character model"),
        _llama("llama-tiny", 4, 128, 8, 4, 352, 256, 2048, "Tiny Llama for CPU training"),
        _llama("llama-mini", 8, 256, 8, 4, 704, 256, 2048, "Small Llama for CPU training"),
        # GPT-2 (Radford et al. 2019)
        _gpt("gpt2", 12, 768, 12, _GPT3, 1024, "GPT-2 small"),
        _gpt("gpt2-medium", 24, 1024, 16, _GPT3, 1024, "GPT-2 medium"),
        _gpt("gpt2-large", 36, 1280, 20, _GPT3, 1024, "GPT-2 large"),
        _gpt("gpt2-xl", 48, 1600, 25, _GPT3, 1024, "GPT-2 XL"),
        # GPT-3 (2005.14165 table 2.1). 1.3B has 16 heads because the head size is 128. 13B has hidden size 5120.
        _gpt("gpt3-125m", 12, 768, 12, _GPT3, 2048, "GPT-3 Small"),
        _gpt("gpt3-350m", 24, 1024, 16, _GPT3, 2048, "GPT-3 Medium"),
        _gpt("gpt3-760m", 24, 1536, 16, _GPT3, 2048, "GPT-3 Large"),
        _gpt("gpt3-1.3b", 24, 2048, 16, _GPT3, 2048, "GPT-3 XL"),
        _gpt("gpt3-2.7b", 32, 2560, 32, _GPT3, 2048, "GPT-3 2.7B"),
        _gpt("gpt3-6.7b", 32, 4096, 32, _GPT3, 2048, "GPT-3 6.7B"),
        _gpt("gpt3-13b", 40, 5120, 40, _GPT3, 2048, "GPT-3 13B"),
        _gpt("gpt3-175b", 96, 12288, 96, _GPT3, 2048, "GPT-3 175B"),
        # Megatron-LM (2104.04473 table 1), vocabulary padded to 51,200
        _gpt("megatron-1.7b", 24, 2304, 24, _MEGATRON, 2048, "Megatron table 1, 1.7B"),
        _gpt("megatron-3.6b", 30, 3072, 32, _MEGATRON, 2048, "Megatron table 1, 3.6B"),
        _gpt("megatron-7.5b", 36, 4096, 32, _MEGATRON, 2048, "Megatron table 1, 7.5B"),
        _gpt("megatron-18b", 40, 6144, 48, _MEGATRON, 2048, "Megatron table 1, 18.4B"),
        _gpt("megatron-39b", 48, 8192, 64, _MEGATRON, 2048, "Megatron table 1, 39.1B"),
        _gpt("megatron-76b", 60, 10240, 80, _MEGATRON, 2048, "Megatron table 1, 76.1B"),
        _gpt("megatron-145b", 80, 12288, 96, _MEGATRON, 2048, "Megatron table 1, 145.6B"),
        _gpt("megatron-175b", 96, 12288, 96, _MEGATRON, 2048, "GPT-3 175B as Megatron runs it"),
        _gpt("megatron-310b", 96, 16384, 128, _MEGATRON, 2048, "Megatron table 1, 310.1B"),
        _gpt("megatron-530b", 105, 20480, 128, _MEGATRON, 2048, "Megatron table 1, 529.6B"),
        _gpt("megatron-1t", 128, 25600, 160, _MEGATRON, 2048, "Megatron table 1, 1008B"),
        _gpt("megatron-22b", 48, 6144, 64, _MEGATRON, 2048, "2205.05198 table 3, 22B"),
        # Llama 2 (2307.09288), Llama 3 (2407.21783 table 3, and the small models of 3.2)
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, _LLAMA2, 4096, "Llama 2 7B"),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, _LLAMA2, 4096, "Llama 2 13B"),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, _LLAMA2, 4096, "Llama 2 70B"),
        _llama("llama3-1b", 16, 2048, 32, 8, 8192, _LLAMA3, 131072, "Llama 3.2 1B", tied=True, rope=_ROPE3, stretch=32),
        _llama("llama3-3b", 28, 3072, 24, 8, 8192, _LLAMA3, 131072, "Llama 3.2 3B", tied=True, rope=_ROPE3, stretch=32),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, _LLAMA3, 8192, "Llama 3 8B", rope=_ROPE3),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, _LLAMA3, 8192, "Llama 3 70B", rope=_ROPE3),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, _LLAMA3, 131072, "Llama 3.1 405B", rope=_ROPE3, stretch=8),
        # Mixture of experts (2401.04088, 2412.19437)
        _llama(
            "mixtral-tiny",
            4,
            128,
            8,
            4,
            352,
            256,
            2048,
            "Small Mixtral for CPU training",
            moe=MoeSpec(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=352),
        ),
        _llama(
            "mixtral-8x7b",
            32,
            4096,
            32,
            8,
            14336,
            _LLAMA2,
            32768,
            "Mixtral 8x7B",
            moe=MoeSpec(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=14336),
            rope=_MIXTRAL_ROPE,
        ),
        _llama(
            "mixtral-8x22b",
            56,
            6144,
            48,
            8,
            16384,
            32768,
            65536,
            "Mixtral 8x22B",
            moe=MoeSpec(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=16384),
            rope=_MIXTRAL_ROPE,
        ),
        _llama(
            "deepseek-v3",
            61,
            7168,
            128,
            128,
            18432,
            129280,
            163840,
            "DeepSeek-V3 without its multi-token prediction module",
            moe=MoeSpec(
                num_experts=256,
                experts_per_token=8,
                expert_ffn_hidden_size=2048,
                shared_experts=1,
                dense_layers=3,
                router_bias=True,
            ),
            mla=MlaSpec(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128),
        ),
        # 2211.05100 table 3, 2204.06745 section 2, 2406.11704 table 1, and 2210.02414 table 11
        _with_block("bloom-176b", "BLOOM 176B", 70, 14336, 112, 57344, 250880, 2048, _BLOOM),
        _with_block("gpt-neox-20b", "GPT-NeoX-20B", 44, 6144, 64, 24576, 50432, 2048, _NEOX, tied=False),
        _with_block(
            *("nemotron-4-340b", "Nemotron-4 340B", 96, 18432, 96, 73728, 256000, 4096, _NEMOTRON),
            tied=False,
            kv_heads=8,
        ),
        _llama("glm-130b", 70, 12288, 96, 96, 32768, 150528, 2048, "GLM-130B with Llama's norms", tied=True),
    ]
)


def expand_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the sizes of a named preset. Unknown names stay unchanged.

    Sizes in `model` override the preset. If one differs, `preset` becomes None.
    """
    name = model.get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return dict(model)
    base = PRESETS[name].model.model_dump()
    changed = any(key in base and value != base[key] for key, value in model.items())
    return {**base, **model, "preset": None if changed else name}


class LayoutTemplate(NamedTuple):
    """Published layout. `cluster` is its hardware, and `twin` is a spec for CPU ranks."""

    title: str
    source: str
    cluster: str
    spec: dict[str, Any]
    twin: dict[str, Any]


_MEGATRON_TRAIN = {
    "seq_len": 2048,
    "precision": "bf16",
    "attention": "unfused",
    "dropout": True,
    "overlap": False,
    "data": "stdlib",
}
# Section 3.3.2 tunes the interleaved schedule but does not state the chunks. 4 chunks have two layers each, fewer at
# both ends. It does not state overlap of tensor collectives, as in Megatron before Transformer Engine.
_LLAMA_LAYOUT = {
    "sequence_parallel": True,
    "regather": True,
    "recompute": "selective",
    "zero": 1,
    "schedule": "interleaved_1f1b",
    "virtual_stages": 4,
}
_LLAMA_TRAIN = {"precision": "bf16", "data": "stdlib"}


def _twin(name: str, model: str, layout: dict[str, Any], **train: int) -> dict[str, Any]:
    usual = {"global_batch": 8, "micro_batches": 2, "seq_len": 128, "steps": 100, "eval_every": 50}
    return {"name": f"{name}, CPU size", "model": {"preset": model}, "layout": layout, "train": {**usual, **train}}


def _megatron(name: str, preset: str, layout: dict[str, Any], batch: int, micro_batches: int) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"preset": preset},
        "layout": {"recompute": "full", "scatter_gather": layout.get("pp", 1) > 1, **layout},
        "train": {**_MEGATRON_TRAIN, "global_batch": batch, "micro_batches": micro_batches},
        "resources": {"device": "cuda", "stack": "megatron_2021"},
    }


def _llama_spec(name: str, layout: dict[str, Any], batch: int, micro_batches: int, seq_len: int) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"preset": "llama3-405b"},
        "layout": {**_LLAMA_LAYOUT, **layout},
        "train": {**_LLAMA_TRAIN, "global_batch": batch, "micro_batches": micro_batches, "seq_len": seq_len},
        "resources": {"device": "cuda", "stack": "megatron_2021"},
    }


def _zero(stage: int) -> dict[str, Any]:
    return {
        "name": f"ZeRO-{stage} 7.5B on 64 GPUs",
        "model": {"preset": "megatron-7.5b"},
        "layout": {"dp": 64, "zero": stage, "recompute": "full"},
        "train": {**_MEGATRON_TRAIN, "precision": "bf16_gradients", "global_batch": 512, "micro_batches": 8},
        "resources": {"device": "cuda", "stack": "deepspeed"},
    }


# Without sharded gradients the step time is closer to the published one. The run sharded them as ZeRO-2 does
# (2407.21783 section 3.3.2).
_LLAMA_SOURCE = "Llama 3, 2407.21783 table 4; it sharded gradients as well, so its memory is up to 6 GiB less"
_MEGATRON_SOURCE = "Megatron-LM, 2104.04473 table 1"
_PLAIN = "planned with plain 1F1B, but the run used interleaved chunks"
_ZERO_SOURCE = "ZeRO, 1910.02054 table 1"
_PIPE = {"pp": 2, "tp": 2}

TEMPLATES: dict[str, LayoutTemplate] = {
    "gpt3-175b-megatron": LayoutTemplate(
        "GPT-3 175B, TP 8 x PP 16 x DP 8",
        f"Megatron-LM, 2104.04473 section 5; {_PLAIN}",
        "a100-80gb",
        _megatron("GPT-3 175B as Megatron ran it", "megatron-175b", {"tp": 8, "pp": 16, "dp": 8}, 1536, 192),
        _twin("GPT-3 175B", "gpt-tiny", _PIPE),
    ),
    "megatron-530b": LayoutTemplate(
        "Megatron 530B, TP 8 x PP 35 x DP 9",
        _MEGATRON_SOURCE,
        "a100-80gb",
        _megatron(
            "Megatron 530B",
            "megatron-530b",
            {"tp": 8, "pp": 35, "dp": 9, "schedule": "interleaved_1f1b", "virtual_stages": 3},
            2520,
            280,
        ),
        _twin("Megatron 530B", "gpt-mini", _PIPE),
    ),
    "megatron-1t": LayoutTemplate(
        "Megatron 1T, TP 8 x PP 64 x DP 6",
        f"{_MEGATRON_SOURCE}; {_PLAIN}",
        "a100-80gb",
        _megatron("Megatron 1T", "megatron-1t", {"tp": 8, "pp": 64, "dp": 6}, 3072, 512),
        _twin("Megatron 1T", "gpt-mini", {"pp": 4}, micro_batches=4),
    ),
    **{
        f"zero{stage}-7.5b": LayoutTemplate(
            f"ZeRO-{stage} 7.5B on 64 GPUs",
            _ZERO_SOURCE,
            "a100-80gb",
            _zero(stage),
            _twin(f"ZeRO-{stage} 7.5B", "gpt-tiny", {"dp": 4, "zero": stage}),
        )
        for stage in (1, 2, 3)
    },
    "llama3-405b-8k": LayoutTemplate(
        "Llama 3 405B on 8,192 GPUs, TP 8 x PP 16 x DP 64",
        _LLAMA_SOURCE,
        "h100",
        _llama_spec("Llama 3 405B, 8,192 GPUs", {"tp": 8, "pp": 16, "dp": 64}, 2048, 32, 8192),
        _twin("Llama 3 405B", "llama-tiny", {**_PIPE, "sequence_parallel": True}),
    ),
    "llama3-405b-16k": LayoutTemplate(
        "Llama 3 405B on 16,384 GPUs, TP 8 x PP 16 x DP 128",
        _LLAMA_SOURCE,
        "h100",
        _llama_spec("Llama 3 405B, 16,384 GPUs", {"tp": 8, "pp": 16, "dp": 128}, 2048, 16, 8192),
        _twin("Llama 3 405B", "llama-tiny", {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 1}),
    ),
    "llama3-405b-long": LayoutTemplate(
        "Llama 3 405B, 131,072 tokens a sequence, TP 8 x CP 16 x PP 16 x DP 8",
        _LLAMA_SOURCE,
        "h100",
        _llama_spec(
            "Llama 3 405B, long context",
            {"tp": 8, "cp": 16, "pp": 16, "dp": 8, "cp_method": "all_gather"},
            128,
            16,
            131072,
        ),
        _twin("Llama 3 405B long", "llama-tiny", {**_PIPE, "sequence_parallel": True}, seq_len=512),
    ),
    **{
        name: LayoutTemplate(
            run.title,
            run.source,
            run.cluster,
            run.build_spec(),
            _twin(run.title.partition(" on ")[0], *run.twin),
        )
        for name, run in FAMOUS_RUNS.items()
    },
}
