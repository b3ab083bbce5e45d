"""Allocations of the memory tape. `tests/memory` compares whole stages with dry runs."""

from __future__ import annotations

import pytest

from planner.cost.memory import find_peak, get_memory, get_stage_memory
from planner.facts.parse_spec import parse_fields


def test_gradient_is_freed_once_its_wider_copy_exists() -> None:
    """A tied table, positions and a norm are copied from 2 bytes to 4.

    The peak occurs while the largest tensor, the table of 32,000 x 256, exists in both types.
    """
    model = {"preset": "gpt-tiny", "vocab_size": 32_000, "hidden_size": 256, "max_seq_len": 1024}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": model | {"tied_embeddings": True}, "layout": {"dp": 2, "zero": 1}, "train": train})
    (chunk,) = get_stage_memory(spec).get_rank(0).chunks
    table, whole = 32_000 * 256, 33_024 * 256 + 512
    widened = chunk.sharding.widen(chunk.parameters.root, first=True)
    assert (widened.peak_bytes, widened.net_bytes) == (table * 4, whole * 2)


@pytest.mark.parametrize(("tied", "tables"), [(True, 1), (False, 2)])
def test_megatron_fsdp_gathers_parameters_outside_layers_for_a_whole_step(tied: bool, tables: int) -> None:
    def get_gathered_bytes(vocab: int) -> int:
        model = {"preset": "gpt-tiny", "vocab_size": vocab, "hidden_size": 256, "tied_embeddings": tied}
        train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
        resources = {"device": "cuda", "stack": "megatron"}
        fields = {"model": model, "layout": {"dp": 2, "zero": 3}, "train": train, "resources": resources}
        return get_memory(parse_fields(fields), 0)["gathered"]

    assert get_gathered_bytes(64_000) - get_gathered_bytes(32_000) == tables * 32_000 * 256 * 2


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_memory_parts_are_not_negative(schedule: str) -> None:
    """Message bytes that chunks also count are subtracted once."""
    layout = {"pp": 8, "schedule": schedule, "virtual_stages": 2, "recompute": "full"}
    train = {"global_batch": 16, "micro_batches": 16, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": {"preset": "gpt2-medium"}, "layout": layout, "train": train})
    assert all(min(find_peak(spec, stage).levels) >= 0 for stage in range(8))
