"""Generate random layouts of models with real vocabularies, small enough for dry runs of a few seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from planner.facts.parse_spec import parse_spec
from planner.facts.resources import Device
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError

VOCABULARIES = (32_000, 50_257, 50_304, 128_256)
SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("naive", 1),
    ("interleaved_1f1b", 2),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 1),
    ("zbv", 2),
    ("dualpipev", 2),
)


def generate_specs(seed: int, device: Device = "cpu") -> Iterator[JobSpec]:
    """Yield specs without end, equal for equal seeds."""
    draw = random.Random(seed)
    while True:
        try:
            spec = parse_spec({**_draw_fields(draw), "resources": {"device": device}})
        except SpecError:
            continue
        if not find_unsupported_fields(spec):
            yield spec


def _draw_fields(draw: random.Random) -> dict[str, Any]:
    pp, (schedule, chunks) = draw.choice((1, 1, 2, 4)), draw.choice(SCHEDULES)
    model = _draw_model(draw)
    layout: dict[str, Any] = {
        "dp": draw.choice((1, 2, 4)),
        "pp": pp,
        "tp": draw.choice((1, 1, 2, 4)),
        "cp": draw.choice((1, 1, 1, 2, 4)),
        "zero": draw.choice((0, 0, 1, 2, 3)),
        "recompute": draw.choice(("none", "none", "selective", "full")),
        "cp_method": draw.choice(("ring", "all_gather")),
    }
    layout["sequence_parallel"] = layout["tp"] > 1 and draw.random() < 0.7
    layout["regather"] = layout["sequence_parallel"] and draw.random() < 0.2
    if pp > 1:
        layout |= {"schedule": schedule, "virtual_stages": chunks, "balance": draw.choice(("layers", "cost"))}
    if "moe" in model:
        layout["ep"] = draw.choice((1, 2, 4))
    micro_batches = draw.choice((1, 2, 3, 4)) if pp == 1 else draw.choice((pp, 2 * pp, 3 * pp))
    train = {
        "micro_batches": micro_batches,
        "global_batch": layout["dp"] * micro_batches * draw.choice((1, 2)),
        "seq_len": draw.choice((512, 1024, 2048)),
        "precision": draw.choice(("fp32", "bf16", "bf16_gradients", "bf16_state", "fp8")),
        "attention": draw.choice(("fused", "fused", "fused", "unfused")),
    }
    return {"model": model, "layout": layout, "train": train}


def _draw_model(draw: random.Random) -> dict[str, Any]:
    llama, hidden = draw.random() < 0.6, draw.choice((512, 768, 1024, 2048))
    heads = hidden // 64
    model: dict[str, Any] = {
        "arch": "llama" if llama else "gpt",
        "num_layers": draw.choice((4, 5, 8, 12)),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": draw.choice((heads, heads // 4)) if llama else heads,
        "ffn_hidden_size": hidden * 11 // 4 if llama else 4 * hidden,
        "vocab_size": draw.choice(VOCABULARIES),
        "max_seq_len": 4096,
        "tied_embeddings": draw.random() < 0.4,
    }
    if llama and draw.random() < 0.35:
        model["moe"] = {
            "num_experts": draw.choice((4, 8, 16)),
            "experts_per_token": draw.choice((1, 2)),
            "expert_ffn_hidden_size": hidden,
            "shared_experts": draw.choice((0, 0, 1)),
            "dense_layers": draw.choice((0, 0, 1)),
            "capacity_factor": draw.choice((None, None, 1.25)),
        }
    return model
