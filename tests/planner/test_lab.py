"""Collective lab: allowed settings, message sizes, and bandwidth formulas."""

from __future__ import annotations

from typing import Any

import pytest

from planner.facts.collectives import LARGEST_EXACT, MAX_SIZES, compute_bandwidths, compute_lab_sizes, get_lab_ranks
from planner.facts.kinds import get_num_slots
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import LAB_PRIMITIVES, LabPrimitive, LabSpec
from planner.facts.validation import SpecError


def build_lab(change: dict[str, Any], dp: int = 4, **more: Any) -> Any:
    return parse_spec({"kind": "lab", "layout": {"dp": dp}, "lab": change, **more})


def test_lab_needs_only_its_ranks() -> None:
    spec = parse_spec({"kind": "lab", "layout": {"dp": 3}})
    assert get_lab_ranks(spec) == (0, 1, 2)
    assert get_num_slots(spec) == 3
    assert build_lab({"primitives": "all"}).lab.primitives == list(LAB_PRIMITIVES)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"ranks": [1]}, "lab.ranks", "gives a group of 1 rank. Use 2 or more ranks."),
        ({"ranks": []}, "lab.ranks", "Use a list of 1 or more entries."),
        ({"ranks": [1, 3, 1]}, "lab.ranks", "`lab.ranks` repeats 1. Use each rank once."),
        ({"ranks": [1, 7]}, "lab.ranks", "`lab.ranks` contains 7, but dp is 4. Use ranks from 0 to 3."),
        ({"ranks": "1,3"}, "lab.ranks", 'is "1,3". Use a list.'),
        ({"ranks": [1, 3], "root": 0}, "lab.root", "`lab.root` is 0, which is not in the group. Use one of 1, 3."),
        ({"min_bytes": 8}, "lab.min_bytes", "`lab.min_bytes` is 8. Use at least 16, one float32 element"),
        ({"min_bytes": 64, "max_bytes": 32}, "lab.max_bytes", "`lab.max_bytes` is 32. Use at least min_bytes 64."),
        ({"max_bytes": 2**33}, "lab.max_bytes", "at most 4294967296"),
        ({"factor": 1}, "lab.factor", "is 1. Use at least 2."),
        ({"iterations": 0}, "lab.iterations", "is 0. Use at least 1."),
        ({"primitives": []}, "lab.primitives", "Use a list of 1 or more entries."),
        ({"primitives": ["barrier", "barrier"]}, "lab.primitives", "`lab.primitives` repeats barrier. Use each once."),
        ({"primitives": ["shout"]}, "lab.primitives.0", "'broadcast', 'scatter', "),
        ({"dtype": "fp4"}, "lab.dtype", "'float32', 'float64', "),
        ({"reduce_op": "mean"}, "lab.reduce_op", "'sum' or 'max'"),
    ],
    ids=str,
)
def test_invalid_lab_names_the_field_and_shows_arithmetic(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        build_lab(change)
    assert any(p.field == field and words in p.message for p in refused.value.problems), refused.value.problems


def test_lab_uses_plain_ranks_and_other_kinds_have_no_lab() -> None:
    with pytest.raises(SpecError, match="sets fields other than dp, but a lab job uses dp only"):
        parse_spec({"kind": "lab", "layout": {"dp": 2, "tp": 2}})
    with pytest.raises(SpecError, match=r"`layout\.dp` gives a group of 1 rank"):
        parse_spec({"kind": "lab"})
    with pytest.raises(SpecError, match="`lab` is set, but the kind is train"):
        parse_spec({"model": {"preset": "gpt-tiny"}, "lab": {}})
    with pytest.raises(SpecError, match=r"`lab\.dtype` is bfloat16, whose sums are exact only up to 256 ranks"):
        build_lab({"dtype": "bfloat16", "min_bytes": 2**16}, dp=257)


def test_sizes_grow_by_the_factor_with_whole_elements_per_rank() -> None:
    assert compute_lab_sizes(LabSpec(min_bytes=1024, max_bytes=20_000, factor=4), 2) == [1024, 4096, 16384]
    assert compute_lab_sizes(LabSpec(min_bytes=100, max_bytes=100), 3) == [96]
    assert compute_lab_sizes(LabSpec(min_bytes=16, max_bytes=40, factor=2, dtype="float64"), 2) == [16, 32]
    assert len(compute_lab_sizes(LabSpec(min_bytes=2, max_bytes=2**32, factor=2, dtype="float16"), 1)) == MAX_SIZES


@pytest.mark.parametrize(
    ("primitive", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
        ("isend_irecv", 1.0),
    ],
)
def test_bandwidths_match_nccl_tests(primitive: LabPrimitive, factor: float) -> None:
    assert compute_bandwidths(primitive, 1000, 0.5, 4) == (2000.0, 2000.0 * factor)


def test_every_type_holds_the_sum_exactly() -> None:
    assert LARGEST_EXACT["bfloat16"] == 2**8
    assert LARGEST_EXACT["float16"] == 2**11
