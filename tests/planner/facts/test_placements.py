"""Tensor placements: shards cover each tensor, and ZeRO shards a suitable dim."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from planner.facts.layout import get_coordinates
from planner.facts.model_shapes import Parameter, get_chunk_units, get_layer_parameters
from planner.facts.parse_spec import parse_spec
from planner.facts.placements import (
    compute_gathered_numel,
    compute_local_parameter,
    compute_shard_numel,
    count_local_kv_heads,
    get_local_box,
    get_local_parameter,
    get_padded_vocab_size,
    get_placement,
    get_zero_shard,
)
from planner.facts.spec import JobSpec

MIXTURE = {
    "arch": "llama",
    "num_layers": 1,
    "hidden_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 36,
    "vocab_size": 261,
    "max_seq_len": 16,
    "tied_embeddings": False,
    "moe": {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 20},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp4 with two kv heads": {"tp": 4},
    "zero3 of odd rows": {"dp": 7, "zero": 3},
    "zero1 over more ranks than experts": {"dp": 6, "zero": 1},
    "hsdp": {"dp": 6, "zero": 2, "dp_replicas": 2},
    "ep2 x zero3": {"dp": 6, "ep": 2, "zero": 3},
    "ep2 x tp2 x cp2 x zero3": {"dp": 3, "ep": 2, "tp": 2, "cp": 2, "zero": 3},
    "ep4 plain": {"dp": 4, "ep": 4},
}


def build_spec(layout: dict[str, Any]) -> JobSpec:
    train = {"global_batch": layout.get("dp", 1), "seq_len": 16}
    return parse_spec({"model": MIXTURE, "layout": layout, "train": train})


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_shards_cover_every_tensor_element_the_expected_number_of_times(layout: dict[str, Any]) -> None:
    spec = build_spec(layout)
    for unit in get_chunk_units(spec.model, range(1), first=True, last=True):
        for parameter in unit.parameters:
            lies = get_placement(spec.model, spec.layout, parameter)
            boxes = Counter(
                get_local_box(spec, get_coordinates(rank, spec.layout), parameter)
                for rank in range(spec.layout.world_size)
            )
            held = {box: ranks for box, ranks in boxes.items() if box.numel}
            assert sum(box.numel for box in held) == parameter.numel
            assert set(held.values()) == {spec.layout.world_size // lies.num_shards}
            corners = {box.offsets for box in held}
            assert len(corners) == len(held), "boxes start at the same corner"


@pytest.mark.parametrize(
    ("shape", "degree", "dim", "rows"),
    [
        ((8, 14336, 4096), 64, 1, 224),  # Mixtral's experts over 64 ranks
        ((8, 14336, 4096), 4, 0, 2),
        ((160, 1536, 5120), 64, 1, 24),
        ((50257, 768), 8, 0, 6283),  # 7 rows of padding cost less than replicas
        ((30,), 4, 0, 8),  # the tensor has no other dim
        ((30, 50), 4, 0, 8),  # no dim divides evenly, which FSDP2 requires of every dim except the first
        ((3, 48), 4, 1, 12),
    ],
)
def test_zero_shards_another_dim_if_the_first_needs_much_padding(
    shape: tuple[int, ...], degree: int, dim: int, rows: int
) -> None:
    shard = get_zero_shard(shape, degree)
    assert shard is not None
    assert (shard.dim, shard.num_shards, shard.rows) == (dim, degree, rows)
    local = Parameter("p", shape, None)
    assert sum(compute_shard_numel(local, degree, index) for index in range(degree)) == math.prod(shape)
    assert compute_gathered_numel(local, degree) == degree * compute_shard_numel(local, degree)


@pytest.mark.parametrize(
    ("size", "tp", "padded"),
    [(50257, 1, 50257), (50257, 8, 51200), (50257, 2, 50432), (128256, 8, 128256), (257, 4, 512)],
)
def test_vocabulary_not_divisible_by_tp_is_padded_like_megatron(size: int, tp: int, padded: int) -> None:
    assert get_padded_vocab_size(size, tp) == padded
    table = Parameter("embedding.weight", (size, 8), 0)
    assert compute_local_parameter(table, 4, tp, 1).shape == (padded // tp, 8)


def test_fewer_experts_than_shards_are_sent_without_padding() -> None:
    spec = parse_spec(
        {
            "model": {"preset": "mixtral-8x7b"},
            "layout": {"dp": 64, "zero": 3},
            "train": {"global_batch": 64, "seq_len": 4096},
        }
    )
    for p in get_layer_parameters(spec.model, moe=True):
        local = get_local_parameter(spec.model, spec.layout, p)
        assert compute_gathered_numel(local, 64) == local.numel, p.name


@pytest.mark.parametrize(("num_kv_heads", "tp", "local"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (2, 8, 1), (1, 4, 1)])
def test_tp_ranks_share_a_kv_head_if_there_are_too_few(num_kv_heads: int, tp: int, local: int) -> None:
    assert count_local_kv_heads(num_kv_heads, tp) == local
