"""ZeRO-3 in a pipeline that keeps gathered parameters: traffic and memory compared with ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.memory import get_memory
from planner.cost.timing import get_step_timing
from planner.cost.traffic import get_step_traffic
from planner.facts.parse_spec import parse_spec
from planner.facts.schedules import build_actions
from planner.facts.spec import JobSpec
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS

KEPT = {"zero": 3, "keep_gathered": True}


def build_spec(layout: dict[str, Any], *, micro_batches: int = 4, **train: Any) -> JobSpec:
    model = {"preset": "llama-mini", "num_layers": 8}
    settings = {"global_batch": 64, "micro_batches": micro_batches, "seq_len": 256, "precision": "bf16"}
    return parse_spec({"model": model, "layout": layout, "train": settings | train})


def count_gathers(asked: JobSpec, stage: int) -> tuple[int, int]:
    """Return (calls, bytes) per step."""
    rows = get_step_traffic(asked, stage * asked.layout.world_size // asked.layout.pp)
    found = [row for row in rows if (row.axis, row.op) == ("dp", "all_gather")]
    return sum(row.count for row in found), sum(row.payload_bytes for row in found)


def count_chunk_turns(asked: JobSpec, stage: int) -> Counter[int]:
    """Return the number of times that a rank switches to each chunk, from the schedule's action list."""
    found: Counter[int] = Counter()
    before = None
    for action in build_actions(asked.layout, stage, asked.train.micro_batches):
        if action.chunk != before:
            found[action.chunk] += 1
        before = action.chunk
    return found


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.fixed_dictionaries(
        {
            "dp": st.sampled_from([2, 4]),
            "pp": st.sampled_from([2, 4]),
            "tp": st.sampled_from([1, 2]),
            "recompute": st.sampled_from(["none", "full"]),
        }
    ),
    st.sampled_from(
        [("1f1b", 1), ("gpipe", 1), ("naive", 1), ("looped_bfs", 1), ("looped_bfs", 2), ("interleaved_zero_bubble", 1)]
    ),
    st.sampled_from([4, 8]),
)
def test_unit_is_gathered_each_time_its_rank_switches_to_it(
    layout: dict[str, Any], schedule: tuple[str, int], micro_batches: int
) -> None:
    layout = {**layout, "schedule": schedule[0], "virtual_stages": schedule[1]}
    kept, each, once = (
        build_spec({**layout, **zero}, micro_batches=micro_batches) for zero in (KEPT, {"zero": 3}, {"zero": 2})
    )
    for stage in range(kept.layout.pp):
        calls, size = count_gathers(kept, stage)
        every_calls, every_size = count_gathers(each, stage)
        counted = count_chunk_turns(kept, stage)
        units = dict.fromkeys(counted, 8 // (kept.layout.pp * schedule[1]))
        units[min(units)] += stage == 0  # embedding table
        units[max(units)] += stage == kept.layout.pp - 1  # head
        assert calls == sum(counted[chunk] * units[chunk] for chunk in units)
        assert size < every_size
        assert every_calls == 2 * micro_batches * sum(units.values())
        if schedule[1] == 1:
            assert get_step_traffic(kept, stage) == get_step_traffic(once, stage)
            assert get_memory(kept, stage) == get_memory(once, stage)
        else:
            least, held, most = (sum(get_memory(asked, stage).values()) for asked in (each, kept, once))
            assert held < most
            assert least <= 1.01 * held  # the last rank of a pipeline holds slightly more with plain ZeRO-3
    cluster = CLUSTERS["h100"]
    assert get_step_timing(kept, cluster).step_s <= get_step_timing(each, cluster).step_s


def test_breadth_first_holds_one_chunk_at_a_time() -> None:
    layout = {"pp": 2, "dp": 2, "schedule": "looped_bfs", "virtual_stages": 4}
    one, all_chunks = (
        get_memory(build_spec({**layout, **zero}, seq_len=16), 0)["gathered"] for zero in (KEPT, {"zero": 2})
    )
    assert 0 < one < all_chunks / 2


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"dp": 2, "pp": 2, "zero": 2}, "ZeRO is 2. Use ZeRO 3"),
        ({"dp": 2, "zero": 3}, "pp 1 keep_gathered has the same effect as ZeRO 2. Use ZeRO 2, or set pp to 2"),
        ({"dp": 2, "pp": 2, "zero": 3, "schedule": "zbv", "virtual_stages": 2}, "ZBV alternates between 2 chunks"),
        ({"dp": 2, "pp": 2, "zero": 3, "schedule": "interleaved_1f1b", "virtual_stages": 4}, "between 4 chunks"),
    ],
)
def test_field_is_rejected_if_nothing_is_kept(layout: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        build_spec({**layout, "keep_gathered": True})
    assert [(p.field, words in p.message) for p in refused.value.problems] == [("layout.keep_gathered", True)]
