"""Layouts that were published, ready to plan; and for each a twin of a size that runs on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple


class Template(NamedTuple):
    """A spec as the form and the parser take it. `cluster` names the hardware; `twin` is a spec for CPU ranks."""

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
# Section 3.3.2 tunes the interleaved schedule and does not tell its chunks: 4 are of two layers, fewer at both ends.
# Of tensor collectives hidden behind products it tells nothing, as of Megatron's before Transformer Engine.
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


def _llama(name: str, layout: dict[str, Any], batch: int, micro_batches: int, seq_len: int) -> dict[str, Any]:
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


# Gradients whole and summed once: its time comes nearer so (2407.21783 section 3.3.2 shards them, as ZeRO-2 does).
_LLAMA_SOURCE = "Llama 3, 2407.21783 table 4; it sharded gradients as well, so its memory is up to 6 GiB less"
_MEGATRON_SOURCE = "Megatron-LM, 2104.04473 table 1"
_PLAIN = "planned with plain 1F1B, but the run used interleaved chunks"
_ZERO_SOURCE = "ZeRO, 1910.02054 table 1"
_PIPE = {"pp": 2, "tp": 2}

TEMPLATES: dict[str, Template] = {
    "gpt3-175b-megatron": Template(
        "GPT-3 175B, TP 8 x PP 16 x DP 8",
        f"Megatron-LM, 2104.04473 section 5; {_PLAIN}",
        "a100-80gb",
        _megatron("GPT-3 175B as Megatron ran it", "megatron-175b", {"tp": 8, "pp": 16, "dp": 8}, 1536, 192),
        _twin("GPT-3 175B", "gpt-tiny", _PIPE),
    ),
    "megatron-530b": Template(
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
    "megatron-1t": Template(
        "Megatron 1T, TP 8 x PP 64 x DP 6",
        f"{_MEGATRON_SOURCE}; {_PLAIN}",
        "a100-80gb",
        _megatron("Megatron 1T", "megatron-1t", {"tp": 8, "pp": 64, "dp": 6}, 3072, 512),
        _twin("Megatron 1T", "gpt-mini", {"pp": 4}, micro_batches=4),
    ),
    **{
        f"zero{stage}-7.5b": Template(
            f"ZeRO-{stage} 7.5B on 64 GPUs",
            _ZERO_SOURCE,
            "a100-80gb",
            _zero(stage),
            _twin(f"ZeRO-{stage} 7.5B", "gpt-tiny", {"dp": 4, "zero": stage}),
        )
        for stage in (1, 2, 3)
    },
    "llama3-405b-8k": Template(
        "Llama 3 405B on 8,192 GPUs, TP 8 x PP 16 x DP 64",
        _LLAMA_SOURCE,
        "h100",
        _llama("Llama 3 405B, 8,192 GPUs", {"tp": 8, "pp": 16, "dp": 64}, 2048, 32, 8192),
        _twin("Llama 3 405B", "llama-tiny", {**_PIPE, "sequence_parallel": True}),
    ),
    "llama3-405b-16k": Template(
        "Llama 3 405B on 16,384 GPUs, TP 8 x PP 16 x DP 128",
        _LLAMA_SOURCE,
        "h100",
        _llama("Llama 3 405B, 16,384 GPUs", {"tp": 8, "pp": 16, "dp": 128}, 2048, 16, 8192),
        _twin("Llama 3 405B", "llama-tiny", {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 1}),
    ),
    "llama3-405b-long": Template(
        "Llama 3 405B, 131,072 tokens a sequence, TP 8 x CP 16 x PP 16 x DP 8",
        _LLAMA_SOURCE,
        "h100",
        _llama(
            "Llama 3 405B, long context",
            {"tp": 8, "cp": 16, "pp": 16, "dp": 8, "cp_method": "all_gather"},
            128,
            16,
            131072,
        ),
        _twin("Llama 3 405B long", "llama-tiny", {**_PIPE, "sequence_parallel": True}, seq_len=512),
    ),
}
