"""Compare the model of a checkpoint with the model of a job."""

from __future__ import annotations

import pytest

from planner.facts.parse_spec import parse_spec
from planner.facts.presets import PRESETS
from workers.checkpoint.load import _describe_changes, describe_model_difference

TINY = PRESETS["gpt-tiny"].model


def test_explicit_and_derived_head_size_are_equal() -> None:
    said = TINY.model_copy(update={"head_dim": TINY.head_size})
    assert describe_model_difference(said, TINY) == describe_model_difference(TINY, said) == ""
    wide = TINY.model_copy(update={"head_dim": 2 * TINY.head_size})
    assert describe_model_difference(wide, TINY) == (
        f"head_dim is {TINY.head_size} in the checkpoint and {2 * TINY.head_size} in the job"
    )


def test_reports_changed_settings_that_affect_the_loss() -> None:
    model = {"preset": "mixtral-tiny"}
    before = parse_spec({"model": model, "train": {"tokenizer": "bytes", "data": "a.txt"}})
    after = parse_spec(
        {
            "model": model,
            "train": {"data": "a.txt", "tokenizer": "other.json", "weight_decay": 0.2, "grad_clip": 0.5},
        }
    )
    routed = after.model.moe
    assert routed is not None
    after = after.model_copy(
        update={"model": after.model.model_copy(update={"moe": routed.model_copy(update={"balance_loss": 0.5})})}
    )
    told = _describe_changes(after, before, 3)
    for words in (
        "tokenizer changed from bytes to other.json",
        "weight_decay changed from 0.1 to 0.2",
        "grad_clip changed from 1.0 to 0.5",
    ):
        assert words in told
    assert "moe.balance_loss changed from 0.01 to 0.5" in told


@pytest.mark.parametrize(
    ("sampling", "batch", "told"),
    [
        ("epochs", 16, "data continues at sequence 100 x 16: 800 sequences of the epoch order skipped"),
        ("epochs", 4, "data continues at sequence 100 x 4: 400 sequences of the epoch order repeated"),
        ("epochs", 8, ""),
        ("random", 16, "(global_batch changed from 8 to 16)"),
    ],
)
def test_reports_skipped_and_repeated_sequences_of_an_epoch(sampling: str, batch: int, told: str) -> None:
    before, after = (
        parse_spec({"model": {"preset": "gpt-tiny"}, "train": {"sampling": sampling, "global_batch": size}})
        for size in (8, batch)
    )
    assert told in _describe_changes(after, before, 100)
    assert bool(told) == bool(_describe_changes(after, before, 100))
