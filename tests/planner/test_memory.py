"""Allocations of the memory tape by themselves; `tests/memory` holds whole stages against dry runs."""

from __future__ import annotations

from planner.cost.memory.stage import rank_of_stage
from planner.facts.parse import parse_fields


def test_a_gradient_is_let_go_when_its_copy_in_the_wider_type_is_there() -> None:
    """A tied table of 32,000 x 256, 1,024 positions, a norm's 2 x 256, from 2 bytes to 4: most while the table is there
    twice. The last tensor alone was said to lie beside its copy."""
    model = {"preset": "gpt-tiny", "vocab_size": 32_000, "hidden_size": 256, "max_seq_len": 1024}
    train = {"global_batch": 4, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    spec = parse_fields({"model": model | {"tied_embeddings": True}, "layout": {"dp": 2, "zero": 1}, "train": train})
    (chunk,) = rank_of_stage(spec, 0).chunks
    table, whole = 32_000 * 256, 33_024 * 256 + 512
    widened = chunk.sharding.widen(chunk.root, first=True)
    assert (widened.peak_bytes, widened.net_bytes) == (table * 4, whole * 2)
