"""Context parallelism saves no scores, so memory grows linearly with the sequence."""

from __future__ import annotations

from typing import Any

import pytest

from planner.facts.parse_spec import parse_fields
from workers.dry_run import run_dry_step


def peak_bytes(seq_len: int, **layout: Any) -> int:
    model = {"preset": "llama-tiny", "max_seq_len": 2**17}
    train = {"global_batch": 1, "seq_len": seq_len}
    return run_dry_step(parse_fields({"model": model, "layout": {"cp": 4, **layout}, "train": train}), 1).peak_bytes


@pytest.mark.parametrize(("method", "recompute"), [("ring", "full"), ("all_gather", "none")])
def test_twice_the_sequence_adds_as_much_again(method: str, recompute: str) -> None:
    short, long, longer = (peak_bytes(n * 2**14, cp_method=method, recompute=recompute) for n in (1, 2, 3))
    assert longer - long == pytest.approx(long - short, rel=0.01)
