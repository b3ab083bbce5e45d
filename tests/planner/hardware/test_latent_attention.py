"""Latent attention with unfused scores, or with a divided sequence."""

from __future__ import annotations

from typing import Any

from planner.cost.memory import get_layer_bytes, get_memory
from planner.facts.parse_spec import parse_spec
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec
from planner.hardware.kernels import FlashAttention, Gemm, build_layer_kernels

MLA = PRESETS["deepseek-v3"].model.mla
HEADS, SEQ_LEN = 16, 1024


def build_latent_spec(attention: str, **layout: Any) -> JobSpec:
    assert MLA is not None
    sizes = {"arch": "llama", "num_layers": 2, "hidden_size": 1024, "num_heads": HEADS, "num_kv_heads": HEADS}
    sizes |= {"ffn_hidden_size": 4096, "vocab_size": 256, "max_seq_len": SEQ_LEN, "tied_embeddings": False}
    train = {"global_batch": 2, "micro_batches": 2, "seq_len": SEQ_LEN, "precision": "bf16", "attention": attention}
    return parse_spec({"model": {**sizes, "mla": MLA.model_dump()}, "layout": layout, "train": train})


def test_unfused_latent_scores_have_the_width_of_fused_ones() -> None:
    fused, unfused = (build_layer_kernels(build_latent_spec(attention)).attention for attention in ("fused", "unfused"))
    (forward,) = [k for k in fused[:1] if isinstance(k, FlashAttention)]
    scores, values = [k for k in unfused[:3] if isinstance(k, Gemm)]
    assert (scores.k, values.n) == (192, 128)
    assert scores.flops + values.flops == 2 * forward.flops, "the mask saves no work"


def test_unfused_latent_attention_keeps_every_score_tensor() -> None:
    scores = HEADS * SEQ_LEN * SEQ_LEN * 2
    assert get_layer_bytes(build_latent_spec("unfused")) - get_layer_bytes(build_latent_spec("fused")) > scores


def test_latent_keys_and_values_are_gathered_for_divided_queries() -> None:
    """Keys and values arrive at once, or in turn with a ring."""
    gathered, ring = (build_latent_spec("fused", cp=2, cp_method=method) for method in ("all_gather", "ring"))
    assert get_layer_bytes(gathered) == get_layer_bytes(ring) == get_layer_bytes(build_latent_spec("fused")) // 2
    assert sum(get_memory(gathered, 0).values()) > sum(get_memory(ring, 0).values())
