"""Allocations of the memory tape by themselves; `tests/memory` holds whole stages against dry runs."""

from __future__ import annotations

import pytest

from planner.cost.memory import find_peak, get_memory, get_stage_memory
from planner.facts.parse_spec import parse_fields


def test_a_gradient_is_let_go_when_its_copy_in_the_wider_type_is_there() -> None:
    """A tied table of 32,000 x 256, 1,024 positions, a norm's 2 x 256, from 2 bytes to 4: most while the table is there
    twice. The last tensor alone was said to lie beside its copy."""
    model = {"preset": "gpt-tiny", "vocab_size": 32_000, "hidden_size": 256, "max_seq_len": 1024}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": model | {"tied_embeddings": True}, "layout": {"dp": 2, "zero": 1}, "train": train})
    (chunk,) = get_stage_memory(spec).get_rank(0).chunks
    table, whole = 32_000 * 256, 33_024 * 256 + 512
    widened = chunk.sharding.widen(chunk.parameters.root, first=True)
    assert (widened.peak_bytes, widened.net_bytes) == (table * 4, whole * 2)


@pytest.mark.parametrize(("tied", "tables"), [(True, 1), (False, 2)])
def test_megatrons_fsdp_gathers_what_is_in_no_layer_for_a_whole_step(tied: bool, tables: int) -> None:
    def gathered(vocab: int) -> int:
        model = {"preset": "gpt-tiny", "vocab_size": vocab, "hidden_size": 256, "tied_embeddings": tied}
        train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
        resources = {"device": "cuda", "stack": "megatron"}
        fields = {"model": model, "layout": {"dp": 2, "zero": 3}, "train": train, "resources": resources}
        return get_memory(parse_fields(fields), 0)["gathered"]

    assert gathered(64_000) - gathered(32_000) == tables * 32_000 * 256 * 2


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_no_part_of_a_memory_is_less_than_nothing(schedule: str) -> None:
    """What chunks count as well was taken off the messages, more than there were."""
    layout = {"pp": 8, "schedule": schedule, "virtual_stages": 2, "recompute": "full"}
    train = {"global_batch": 16, "micro_batches": 16, "seq_len": 1024, "precision": "bf16"}
    spec = parse_fields({"model": {"preset": "gpt2-medium"}, "layout": layout, "train": train})
    assert all(min(find_peak(spec, stage).levels) >= 0 for stage in range(8))
