"""What the columns do not say of a row's mixture: its experts, how many a token meets, over what they are divided."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published.rows import PublishedRow, SkipError
from planner.facts.spec import MlaSpec, MoeSpec

_MLA = MlaSpec(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
# Megatron-LM's own tests, tests/functional_tests/test_cases/*/model_config.yaml.
_TEST_MLA = MlaSpec(q_rank=192, kv_rank=64, nope_head_dim=16, rope_head_dim=8, value_head_dim=16)


class _Mixture(NamedTuple):
    """What the columns do not say of a mixture: its routed experts, how many a token meets, the rest. `ffn` of an
    expert where the column has another."""

    experts: int
    top: int
    shared: int = 0
    dense: int = 0
    dense_ffn: int = 0
    mla: MlaSpec | None = None
    ffn: int = 0


_PROXY_MLA = MlaSpec(q_rank=256, kv_rank=128, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
# (pattern in the model's name; its mixture as the model's own configuration has it). The first are Megatron-LM's tests;
# experts of 1024 without gate have as many weights as gated ones of 683.
_MIXTURES = (
    (
        r"ep4_etp1_(mtp|memory_speed|resume)",
        _Mixture(32, 4, shared=1, dense=1, dense_ffn=4096, mla=_MLA, ffn=1024),
    ),
    (r"ep4_etp1", _Mixture(32, 4, shared=1, dense=3, dense_ffn=4096, mla=_MLA, ffn=1024)),
    (r"deepseek_proxy", _Mixture(8, 4, shared=1, dense=1, dense_ffn=2048, mla=_PROXY_MLA, ffn=1024)),
    (r"te_ep8_resume", _Mixture(8, 2, ffn=683)),
    (r"scoped_cudagraph", _Mixture(8, 2, dense=4, ffn=683)),
    (r"ep2_etp2_pp2", _Mixture(8, 2, ffn=683)),
    (r"deepseekv3_proxy", _Mixture(64, 8, shared=1, dense=3, dense_ffn=18432, mla=_MLA, ffn=2048)),
    (r"mixtral", _Mixture(8, 2)),
    (r"grok-?1", _Mixture(8, 2)),
    (r"dbrx", _Mixture(16, 4)),
    (r"llama-?4.*(maverick|400b|e128)", _Mixture(128, 1, shared=1, dense=24, dense_ffn=16384, ffn=8192)),
    (r"llama-?4.*(scout|109b|e16)", _Mixture(16, 1, shared=1, ffn=8192)),
    (r"gpt-oss-120b", _Mixture(128, 4)),
    (r"gpt-oss-20b", _Mixture(32, 4)),
    (r"qwen3.*a3b|qwen3.*a22b", _Mixture(128, 8)),
    (r"deepseek-?v3|deepseek-?r1", _Mixture(256, 8, shared=1, dense=3, dense_ffn=18432, mla=_MLA)),
    (r"kimi-k2", _Mixture(384, 8, shared=1, dense=1, dense_ffn=18432, mla=_MLA)),
)


def mixture_of(row: PublishedRow, text: str) -> tuple[MoeSpec | None, MlaSpec | None, int]:
    """(experts, latent attention, width of the dense layers' MLP where it differs from the column)"""
    ffn, layers = row.count("ffn", 4 * row.count("hidden")), row.count("layers")
    found = next((mixture for pattern, mixture in _MIXTURES if re.search(pattern, text)), None)
    if found is None:
        number = re.search(r"num-experts=(\d+)|(\d+) experts", text)
        if number is None:
            if "moe" in text or row.count("ep", 1) > 1:
                raise SkipError("unknown number of experts")
            return None, _TEST_MLA if "multi-latent-attention" in text else None, 0
        top = re.search(r"router-topk=(\d+)|top (\d+)", text)
        found = _Mixture(int(number[1] or number[2]), int(top[1] or top[2]) if top else 1)
        if not is_gated(row, text):
            ffn = round(ffn * 2 / 3)  # as many weights in a gated MLP
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


def is_gated(row: PublishedRow, text: str) -> bool:
    if "swiglu" in text:
        return True
    return not re.search(r"\b(mpt|gpt|bloom|opt|nemotron|moe-test)", row.text("model").lower())


def expert_tp(row: PublishedRow, text: str, tp: int) -> int:
    """Tensor ranks that divide an expert: as a row says, 1 in NVIDIA's recipes for fine-grained mixtures (dgxc's
    deepseek_v3/pretraining/launch.sh; Megatron-Bridge's *_workload_base_configs.py), tp by Megatron's default."""
    if found := re.search(r"\betp ?(\d+)|_etp(\d+)|expert-tensor-parallel-size=(\d+)", text):
        return int(next(size for size in found.groups() if size))
    return 1 if row.source == "NVIDIA-NeMo/Megatron-Bridge" or "deepseek" in text else tp
