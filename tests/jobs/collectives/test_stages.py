"""Simulate stages that end in the captured tensors and send the bytes of the algorithm."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from jobs.runs.collectives import picture
from jobs.runs.collectives.stages import ARRIVALS, BARRIER_END, SimulatedCollective, make_example, simulate_collective
from planner.facts.collectives import LabRankValues, LabResult, LabStep, compute_algorithmic_bytes, get_metered_op
from planner.facts.spec import LAB_PRIMITIVES, LabPrimitive
from tests.jobs.collectives.test_benchmarks import RESULT

SHOWN = [primitive for primitive in LAB_PRIMITIVES if primitive != "barrier"]


def result(ranks: int, root: int, op: str) -> LabResult:
    told = {**RESULT, "ranks": list(range(ranks)), "root": root, "reduce_op": op, "world_size": ranks}
    return LabResult.model_validate_json(json.dumps(told))


def make_captured(primitive: LabPrimitive, n: int, root: int, op: str, share: int = 2) -> LabStep:
    """Return tensors before and after from the definition of the collective."""
    full = share * n

    def own(rank: int, count: int) -> list[float]:
        return [100.0 * (rank + 1) + i for i in range(count)]

    ranks = range(n)
    combine = max if op == "max" else sum
    reduced = [combine(own(rank, full)[i] for rank in ranks) for i in range(full)]
    joined = [value for rank in ranks for value in own(rank, share)]
    before: list[Any] = [own(rank, full) for rank in ranks]
    after: list[Any]
    match primitive:
        case "broadcast":
            after = [before[root]] * n
        case "scatter":
            after = [before[root][r * share : (r + 1) * share] for r in ranks]
            before = [before[r] if r == root else None for r in ranks]
        case "gather" | "all_gather":
            before = [own(r, share) for r in ranks]
            after = [joined if primitive == "all_gather" or r == root else None for r in ranks]
        case "reduce":
            after = [reduced if r == root else [0.0] * full for r in ranks]
        case "all_reduce":
            after = [reduced] * n
        case "reduce_scatter":
            after = [reduced[r * share : (r + 1) * share] for r in ranks]
        case "all_to_all":
            after = [[v for o in ranks for v in before[o][r * share : (r + 1) * share]] for r in ranks]
        case _:
            after = [before[r - 1] for r in ranks]
    holdings = zip(ranks, before, after, strict=True)
    return LabStep(
        primitive=primitive,
        holdings=tuple(LabRankValues(rank=r, before=b and tuple(b), after=a and tuple(a)) for r, b, a in holdings),
    )


def simulate(primitive: LabPrimitive, n: int, root: int = 0, op: str = "sum", share: int = 2) -> SimulatedCollective:
    found = simulate_collective(result(n, root, op), make_captured(primitive, n, root, op, share))
    assert found is not None
    return found


@pytest.mark.parametrize("primitive", SHOWN)
@pytest.mark.parametrize(
    ("n", "root", "op"), [(2, 1, "sum"), (3, 2, "max"), (4, 0, "sum"), (5, 3, "sum"), (8, 7, "max")]
)
def test_last_stage_equals_the_captured_tensors(primitive: LabPrimitive, n: int, root: int, op: str) -> None:
    found = simulate(primitive, n, root, op)
    assert found.agrees
    assert found.stages[-1].rows[root]
    assert None not in found.stages[-1].rows[root]


@pytest.mark.parametrize("primitive", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("n", [2, 4, 5])
def test_each_rank_sends_the_bytes_of_the_cost_model(primitive: LabPrimitive, n: int) -> None:
    sent = Counter(
        move.source for stage in simulate(primitive, n).stages for move in stage.moves if move.source != move.target
    )
    elements = compute_algorithmic_bytes(get_metered_op(primitive), 8 * 2 * n, n) // 8
    assert sent == dict.fromkeys(range(n), elements)


@pytest.mark.parametrize(
    ("primitive", "n", "stages"),
    [("broadcast", 8, 3), ("broadcast", 5, 3), ("reduce", 8, 3), ("all_reduce", 4, 6), ("reduce_scatter", 4, 4)],
)
def test_tree_has_logarithmic_and_ring_linear_rounds(primitive: LabPrimitive, n: int, stages: int) -> None:
    assert len(simulate(primitive, n).stages) == stages


def test_elements_move_after_they_arrived() -> None:
    """All ranks of a round send at once, so a rank forwards what it had before the round."""
    first = simulate("all_gather", 4).stages[0]
    assert sum(value is not None for row in first.rows for value in row) == 4 * 4
    first = simulate("broadcast", 8, root=3).stages[0]
    assert [(move.source, move.target) for move in first.moves[:1]] == [(3, 4)]
    assert len(first.moves) == 16


def test_reports_tensors_that_differ_from_the_last_stage() -> None:
    step = make_captured("all_reduce", 4, 0, "sum")
    wrong = step.model_copy(
        update={"holdings": (step.holdings[0].model_copy(update={"after": (1.0,) * 8}), *step.holdings[1:])}
    )
    found = simulate_collective(result(4, 0, "sum"), wrong)
    assert found is not None
    assert not found.agrees


@pytest.mark.parametrize("primitive", SHOWN)
def test_impossible_buffers_have_no_stages(primitive: LabPrimitive) -> None:
    holdings = tuple(LabRankValues(rank=r, before=(1.0,) * r or None, after=(9.0,)) for r in range(3))
    found = simulate_collective(result(3, 0, "sum"), LabStep(primitive=primitive, holdings=holdings))
    assert found is None or not found.agrees


def test_film_colors_values_by_source_rank() -> None:
    film = picture.make_film(result(4, 0, "sum"), make_captured("reduce_scatter", 4, 0, "sum"))
    assert film is not None
    assert film["start"][1][0] == ["200", "1"]
    assert film["stages"][0]["rows"][1] != film["start"][1]
    assert {whose for row in film["stages"][-1]["rows"] for _, whose in row} == {"combined"}
    assert film["given"] is None
    assert picture.make_film(result(4, 0, "sum"), make_captured("all_to_all", 4, 0, "sum"))["given"][2][0] == [
        "300",
        "2",
    ]  # type: ignore[index]


def test_barrier_is_played_in_the_order_of_time() -> None:
    came = {0: (0.0, 41.0), 1: (12.5, 42.0), 2: (3.0, 40.0)}
    holdings = tuple(LabRankValues(rank=r, before=(a,), after=(b,)) for r, (a, b) in came.items())
    film = picture.make_film(result(3, 0, "sum"), LabStep(primitive="barrier", holdings=holdings))
    assert film is not None
    assert [stage["words"] for stage in film["stages"]] == [
        "Rank 0 arrives at 0.0 µs. 1 of 3 ranks wait at the barrier.",
        "Rank 2 arrives at 3.0 µs. 2 of 3 ranks wait at the barrier.",
        "Rank 1 arrives at 12.5 µs. 3 of 3 ranks wait at the barrier.",
        "Rank 2 leaves at 40.0 µs. 2 of 3 ranks wait at the barrier.",
        "Rank 0 leaves at 41.0 µs. 1 of 3 ranks wait at the barrier.",
        "Rank 1 leaves at 42.0 µs. All ranks have left.",
    ]


@pytest.mark.parametrize("name", LAB_PRIMITIVES)
def test_example_follows_the_definition(name: LabPrimitive) -> None:
    if name == "barrier":
        assert max(ARRIVALS) < BARRIER_END
        return
    expected = make_captured(name, 4, 0, "sum", 1)
    found = make_example(name)
    assert [one.before for one in found.holdings] == [one.before for one in expected.holdings]
    after = [(one.after, two.after) for one, two in zip(found.holdings, expected.holdings, strict=True)]
    assert all(one == two for one, two in after if one is not None)
    assert after[0][0] is not None
