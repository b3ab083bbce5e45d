"""Whether a checkpoint's model is the one that is asked for, by its shape alone."""

from __future__ import annotations

from planner.facts.models.presets import PRESETS
from workers.checkpoint.load import model_difference

TINY = PRESETS["gpt-tiny"].model


def test_a_head_is_as_wide_whether_its_size_is_said_or_follows() -> None:
    said = TINY.model_copy(update={"head_dim": TINY.head_size})
    assert model_difference(said, TINY) == model_difference(TINY, said) == ""
    wide = TINY.model_copy(update={"head_dim": 2 * TINY.head_size})
    assert model_difference(wide, TINY) == f"head_dim {TINY.head_size} is not {2 * TINY.head_size}"
