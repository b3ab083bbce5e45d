"""The collective lab times, counts and checks every primitive, and detects wrong elements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from planner.facts.collectives import LabResult, LabStep, compute_algorithmic_bytes, compute_bandwidths, get_metered_op
from planner.facts.spec import LAB_PRIMITIVES, LabDtype, LabPrimitive
from tests.support.ranks import run_ranks
from workers.lab import primitives as values
from workers.lab.primitives import (
    RankContext,
    build_expected,
    build_input,
    build_pattern,
    count_mismatches,
    fill_readable,
)

QUICK = {"min_bytes": 256, "max_bytes": 4096, "factor": 16, "iterations": 3, "warmup": 1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "4 ranks, bfloat16, max": (4, {"dtype": "bfloat16", "reduce_op": "max", "root": 2}),
    "ranks 1 and 3 of 4": (4, {"ranks": [1, 3], "root": 3}),
}


def measured(folder: Path, world: int, lab: dict[str, Any], module: str) -> tuple[Path, Any]:
    spec, out = folder / "spec.json", folder / "result.json"
    spec.write_text(json.dumps({"kind": "lab", "layout": {"dp": world}, "lab": {**QUICK, **lab}}))
    return out, run_ranks(world, module, "--spec", str(spec), "--out", str(out), GLOO_SOCKET_IFNAME="lo")


@pytest.fixture(scope="module", params=CASES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LabResult:
    world, lab = CASES[request.param]
    out, done = measured(tmp_path_factory.mktemp("lab"), world, lab, "workers.lab.__main__")
    assert done.returncode == 0, done.stderr
    found = LabResult.model_validate_json(out.read_text())
    assert (found.world_size, found.ranks) == (world, tuple(lab.get("ranks", range(world))))
    assert found.root == lab.get("root", 0)
    return found


def test_measures_every_primitive_and_size_without_wrong_elements(result: LabResult) -> None:
    measured = [(p.primitive, p.num_bytes) for p in result.points]
    sizes = [(name, size) for name in LAB_PRIMITIVES if name != "barrier" for size in (256, 4096)]
    assert measured == [*sizes, ("barrier", 0)]
    assert result.wrong == 0
    assert all(p.checked > 0 for p in result.points)
    item = torch.empty(0, dtype=getattr(torch, result.dtype)).element_size()
    checked = {p.primitive: p.checked for p in result.points if p.num_bytes in (0, 4096)}
    n, calls, full = len(result.ranks), result.iterations, 4096 // item
    assert checked["all_reduce"] == checked["all_gather"] == n * calls * full
    assert checked["scatter"] == checked["reduce"] == checked["reduce_scatter"] == calls * full


def test_metered_bytes_match_prediction(result: LabResult) -> None:
    n = len(result.ranks)
    for p in result.points:
        assert p.payload_bytes == p.num_bytes
        assert p.algorithmic_bytes == compute_algorithmic_bytes(get_metered_op(p.primitive), p.num_bytes, n)


def test_bandwidths_follow_from_time(result: LabResult) -> None:
    for p in result.points:
        report = (p.algbw, p.busbw)
        assert report == (
            compute_bandwidths(p.primitive, p.num_bytes, p.seconds, len(result.ranks)) if p.num_bytes else (None,) * 2
        )


def held(result: LabResult, primitive: LabPrimitive) -> tuple[list[Any], list[Any]]:
    """Return the buffers of all ranks before and after a primitive, in group order."""
    step: LabStep = next(s for s in result.steps if s.primitive == primitive)
    assert tuple(h.rank for h in step.holdings) == result.ranks
    return [h.before for h in step.holdings], [h.after for h in step.holdings]


def test_records_buffers_of_small_tensors(result: LabResult) -> None:
    ranks, root = result.ranks, result.ranks.index(result.root)
    n, places = len(ranks), range(len(ranks))
    own = [tuple(100.0 * (rank + 1) + i for i in range(4)) for rank in ranks]
    share = 4 // n
    parts = [[values[p * share : (p + 1) * share] for p in places] for values in own]
    together = tuple(sum(v) if result.reduce_op == "sum" else max(v) for v in zip(*own, strict=True))
    joined = tuple(v for values in own for v in values[:share])
    assert held(result, "broadcast") == (own, [own[root]] * n)
    assert held(result, "scatter") == ([own[p] if p == root else None for p in places], parts[root])
    shares = [values[:share] for values in own]
    assert held(result, "gather") == (shares, [joined if p == root else None for p in places])
    assert held(result, "all_gather") == (shares, [joined] * n)
    assert held(result, "all_reduce") == (own, [together] * n)
    before, after = held(result, "reduce")
    assert (before, after[root]) == (own, together)
    assert held(result, "reduce_scatter") == (own, [together[p * share : (p + 1) * share] for p in places])
    swapped = [tuple(v for q in places for v in parts[q][p]) for p in places]
    assert held(result, "all_to_all") == (own, swapped)
    for primitive in ("send_recv", "isend_irecv"):
        assert held(result, primitive) == (own, [own[p - 1] for p in places])
    came, left = held(result, "barrier")
    assert min(left) >= max(came)


def test_wrong_element_fails_the_lab_with_its_location(tmp_path: Path) -> None:
    lab = {"primitives": ["broadcast", "all_reduce"]}
    out, done = measured(tmp_path, 2, lab, "tests.workers.broken_lab")
    assert done.returncode != 0
    assert "error: all_reduce of 256 B: 3 of 384 elements are wrong" in done.stderr
    found = LabResult.model_validate_json(out.read_text())
    assert {p.primitive: p.wrong for p in found.points} == {"broadcast": 0, "all_reduce": 3}


def setting(me: int, ranks: tuple[int, ...] = (1, 3), dtype: LabDtype = "float32") -> RankContext:
    fill = build_pattern(dtype, len(ranks))
    return RankContext(ranks, me, 0, torch.device("cpu"), getattr(torch, dtype), "sum", fill)


@pytest.mark.parametrize("primitive", [p for p in LAB_PRIMITIVES if p != "barrier"])
def test_counts_one_altered_element(primitive: LabPrimitive) -> None:
    wanted = build_expected(primitive, setting(0), 64)
    assert wanted is not None
    found = wanted.clone()
    assert count_mismatches(found, wanted) == 0
    found[17] += 1
    assert count_mismatches(found, wanted) == 1
    found[3] = float("nan")
    assert count_mismatches(found, wanted) == 2


@pytest.mark.parametrize("primitive", [p for p in LAB_PRIMITIVES if p != "barrier"])
@pytest.mark.parametrize("reduce_op", ["sum", "max"])
def test_values_do_not_depend_on_block_size(
    primitive: LabPrimitive, reduce_op: Literal["sum", "max"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks bound the memory of int64 indices."""
    asked: list[int] = []
    here = setting(0, (1, 3), "bfloat16")._replace(reduce_op=reduce_op)

    def fill(rank: int, index: torch.Tensor) -> torch.Tensor:
        asked.append(index.numel())
        return here.fill(rank, index)

    monkeypatch.setattr(values, "BLOCK_ELEMENTS", 2**30)
    whole = [make(primitive, here, 2000) for make in (build_input, build_expected)]
    monkeypatch.setattr(values, "BLOCK_ELEMENTS", 96)
    parts = [make(primitive, here._replace(fill=fill), 2000) for make in (build_input, build_expected)]
    assert max(asked) == 96
    for mine, right in zip(parts, whole, strict=True):
        assert mine is not None
        assert right is not None
        assert torch.equal(mine, right)
        assert count_mismatches(mine, right + 1) == right.numel()


def test_missing_output_is_wrong_unless_undefined() -> None:
    wanted = build_expected("all_reduce", setting(0), 64)
    assert wanted is not None
    assert count_mismatches(None, wanted) == count_mismatches(wanted[:-1], wanted) == 64
    assert build_expected("reduce", setting(1), 64) is None
    assert build_expected("gather", setting(1), 64) is None
    assert count_mismatches(wanted, None) == 0
    assert build_input("scatter", setting(1), 64) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("size", [2, 8, 256])
def test_sums_are_exact_and_values_differ_by_rank(dtype: LabDtype, size: int) -> None:
    ranks = tuple(range(size))
    here = setting(0, ranks, dtype)
    sums = build_expected("all_reduce", here, 2 * size)
    assert sums is not None
    index = torch.arange(2 * size)
    assert sums.to(torch.int64).tolist() == [
        sum(int(here.fill(rank, index[i : i + 1])) for rank in ranks) for i in range(2 * size)
    ]
    first, second = (build_input("all_reduce", setting(me, ranks, dtype), 2 * size) for me in (0, 1))
    assert first is not None
    assert count_mismatches(first, second) > size


def test_detects_shifted_shard_in_bfloat16() -> None:
    wanted = build_expected("all_gather", setting(0, tuple(range(8)), "bfloat16"), 1024)
    assert wanted is not None
    assert count_mismatches(wanted.roll(128), wanted) > 900


def test_readable_values_differ_from_their_sums() -> None:
    index = torch.arange(16)
    own = [fill_readable(rank, index) for rank in range(16)]
    for size in range(2, 17):
        total = sum(own[:size], torch.zeros(16, dtype=torch.int64))
        assert not {int(v) for values in own[:size] for v in values} & {int(v) for v in total}
