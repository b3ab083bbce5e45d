"""Expert counts and other facts of mixtures that the columns of a row omit."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published.rows import PublishedRow, SkipError
from planner.facts.model_parts import MlaSpec, MoeSpec

_MLA = MlaSpec(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)


class _MixtureFacts(NamedTuple):
    """Routed experts, experts per token, and other facts of a mixture. `ffn` replaces the column."""

    experts: int
    top: int
    shared: int = 0
    dense: int = 0
    dense_ffn: int = 0
    mla: MlaSpec | None = None
    ffn: int = 0


# (pattern in the model's name, and its mixture from the model's own configuration).
_MIXTURES = (
    (r"mixtral", _MixtureFacts(8, 2)),
    (r"grok-?1", _MixtureFacts(8, 2)),
    (r"dbrx", _MixtureFacts(16, 4)),
    (r"llama-?4.*(maverick|400b|e128)", _MixtureFacts(128, 1, shared=1, dense=24, dense_ffn=16384, ffn=8192)),
    (r"llama-?4.*(scout|109b|e16)", _MixtureFacts(16, 1, shared=1, ffn=8192)),
    (r"gpt-oss-120b", _MixtureFacts(128, 4)),
    (r"gpt-oss-20b", _MixtureFacts(32, 4)),
    (r"qwen3.*a3b|qwen3.*a22b", _MixtureFacts(128, 8)),
    (r"deepseek-?v3|deepseek-?r1", _MixtureFacts(256, 8, shared=1, dense=3, dense_ffn=18432, mla=_MLA)),
    (r"kimi-k2", _MixtureFacts(384, 8, shared=1, dense=1, dense_ffn=18432, mla=_MLA)),
)


def find_mixture(row: PublishedRow, text: str) -> tuple[MoeSpec | None, MlaSpec | None, int]:
    """Return experts, latent attention, and the MLP width of dense layers if it differs from the column."""
    ffn, layers = row.count("ffn", 4 * row.count("hidden")), row.count("layers")
    found = next((mixture for pattern, mixture in _MIXTURES if re.search(pattern, text)), None)
    if found is None:
        number = re.search(r"num-experts=(\d+)|(\d+) experts", text)
        if number is None:
            if "moe" in text or row.count("ep", 1) > 1:
                raise SkipError("unknown number of experts")
            return None, None, 0
        top = re.search(r"router-topk=(\d+)|top (\d+)", text)
        found = _MixtureFacts(int(number[1] or number[2]), int(top[1] or top[2]) if top else 1)
        if not has_gated_mlp(row, text):
            ffn = convert_to_gated(ffn, max(1, row.count("tp", 1)))
    is_gpt_oss = "gpt-oss" in text  # its config.json: biases of experts, `swiglu_limit`
    moe = MoeSpec(
        expert_bias=is_gpt_oss,
        swiglu_limit=7.0 if is_gpt_oss else None,
        num_experts=found.experts,
        experts_per_token=min(found.top, found.experts),
        expert_ffn_hidden_size=found.ffn or ffn,
        shared_experts=found.shared,
        dense_layers=found.dense if found.dense < layers else 0,
    )
    mla = found.mla or (_MLA if "multi-latent-attention" in text else None)
    return moe, mla, found.dense_ffn


def convert_to_gated(ffn: int, tp: int) -> int:
    """Return the width of a gated MLP with as many weights, divisible by the tensor ranks."""
    return round(ffn * 2 / 3 / (8 * tp)) * 8 * tp


def has_gated_mlp(row: PublishedRow, text: str) -> bool:
    if "swiglu" in text:
        return True
    return not re.search(r"\b(mpt|gpt|bloom|opt|nemotron|moe-test)", row.text("model").lower())


def get_expert_tp(row: PublishedRow, text: str, tp: int) -> int:
    """Return the tensor ranks that shard an expert, from the row or from defaults.

    NVIDIA's recipes for fine-grained mixtures have 1 (dgxc's deepseek_v3/pretraining/launch.sh; Megatron-Bridge's
    *_workload_base_configs.py). Megatron's default is tp.
    """
    if found := re.search(r"\betp ?(\d+)|_etp(\d+)|expert-tensor-parallel-size=(\d+)", text):
        return int(next(size for size in found.groups() if size))
    return 1 if row.source == "NVIDIA-NeMo/Megatron-Bridge" or "deepseek" in text else tp


class _ModelSizes(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


# (pattern in the model's name, its sizes): first match wins. Vision and other generations of a name are other models.
_NAMED = (
    (r"^deepseek-?v3(?!\.\d)", _ModelSizes(61, 7168, 128, 128, 2048, 129280)),
    (r"^kimi-k2(?!\.\d)", _ModelSizes(61, 7168, 64, 64, 2048, 163840)),
    (r"^qwen3-30b-a3b", _ModelSizes(48, 2048, 32, 4, 768, 151936)),
    (r"^qwen3-235b-a22b", _ModelSizes(94, 4096, 64, 4, 1536, 151936)),
    (r"^gpt-oss-120b", _ModelSizes(36, 2880, 64, 8, 2880, 201088)),
    (r"^gpt-oss-20b", _ModelSizes(24, 2880, 64, 8, 2880, 201088)),
    (r"^llama-?3(\.\d)?-8b", _ModelSizes(32, 4096, 32, 8, 14336, 128256)),
    (r"^llama-?3(\.\d)?-70b", _ModelSizes(80, 8192, 64, 8, 28672, 128256)),
    (r"^llama-?3(\.\d)?-405b", _ModelSizes(126, 16384, 128, 8, 53248, 128256)),
)


def fill_sizes(row: PublishedRow) -> PublishedRow:
    """Return the row with the sizes of its model if it has none."""
    if any(row.text(column) for column in _ModelSizes._fields):
        return row
    name = re.sub(r"[ _]+", "-", row.text("model").lower())
    found = next((sizes for pattern, sizes in _NAMED if re.search(pattern, name)), None)
    if found is None:
        return row
    return row._replace(fields=row.fields | {column: str(size) for column, size in found._asdict().items()})
