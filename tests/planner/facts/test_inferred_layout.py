"""Groups of public training scripts give their layout, or an error that names the missing ranks."""

from __future__ import annotations

from typing import Any

import pytest

from planner.facts.inferred_layout import CannotInferError, GroupTraffic, infer_layout
from planner.facts.spec import Layout

MIB = 2**20


def reduce_gradients(label: str, size: int, calls: float = 4) -> GroupTraffic:
    return GroupTraffic(label, size, "all_reduce", calls, 100 * MIB)


def shard(label: str, size: int, gathers: float) -> list[GroupTraffic]:
    gather = GroupTraffic(label, size, "all_gather", gathers, gathers * 10 * MIB)
    return [gather, GroupTraffic(label, size, "reduce_scatter", 10, 100 * MIB)]


LOSS = GroupTraffic("world", 8, "all_reduce", 1, 4)
SEND = [GroupTraffic("pp", 2, op, 8, 8 * MIB) for op in ("send", "recv")]
CASES: dict[str, tuple[int, list[GroupTraffic], dict[str, Any]]] = {
    "one rank": (1, [], {}),
    "DDP": (4, [reduce_gradients("world", 4)], {"dp": 4}),
    "FSDP2 with reshard": (4, shard("world", 4, 19), {"dp": 4, "zero": 3}),
    "FSDP2 without reshard": (4, shard("world", 4, 10), {"dp": 4, "zero": 2}),
    "torchtitan HSDP": (
        8,
        [*shard("dp_shard", 4, 19), reduce_gradients("dp_replicate", 2), LOSS],
        {"dp": 8, "dp_replicas": 2, "zero": 3},
    ),
    "tensor parallel": (8, [reduce_gradients("tp", 2), reduce_gradients("dp", 4), LOSS], {"tp": 2, "dp": 4}),
    "sequence parallel": (2, shard("tp", 2, 10), {"tp": 2, "sequence_parallel": True}),
    "pipeline": (2, SEND, {"pp": 2}),
    "unlabeled pipeline": (2, [row._replace(label="world") for row in SEND], {"pp": 2}),
    "stages over the default group": (
        4,
        [reduce_gradients("dp", 2), *(row._replace(label="world", size=4) for row in SEND)],
        {"pp": 2, "dp": 2},
    ),
    "2D without names": (8, [reduce_gradients("ranks 0,2,4,6", 4), *SEND], {"pp": 2, "dp": 4}),
    "Megatron": (
        8,
        [
            reduce_gradients("TENSOR_MODEL_PARALLEL_GROUP", 2),
            GroupTraffic("MODEL_PARALLEL_GROUP", 4, "all_reduce", 1, 4),
            *(row._replace(label="PIPELINE_MODEL_PARALLEL_GROUP") for row in SEND),
            reduce_gradients("DATA_PARALLEL_GROUP_WITH_CP", 2),
            *(row._replace(label="CONTEXT_PARALLEL_GROUP") for row in SEND),
        ],
        {"tp": 2, "pp": 2, "cp": 2},
    ),
    "experts": (
        4,
        [reduce_gradients("world", 4), GroupTraffic("ep", 2, "all_to_all", 8, 8 * MIB)],
        {"dp": 4, "ep": 2},
    ),
    "unlabeled experts": (
        4,
        [reduce_gradients("world", 4), GroupTraffic("ranks 0-1", 2, "all_to_all", 8, 800 * MIB)],
        {"dp": 4, "ep": 2},
    ),
    "context parallel": (
        4,
        [reduce_gradients("dp_cp", 4), GroupTraffic("cp", 2, "all_gather", 8, MIB), reduce_gradients("dp", 2)],
        {"dp": 2, "cp": 2, "cp_method": "all_gather"},
    ),
    "data and context in one group": (
        4,
        [reduce_gradients("cp_dp", 4), GroupTraffic("cp", 2, "all_gather", 8, MIB)],
        {"dp": 2, "cp": 2, "cp_method": "all_gather"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_give_their_layout(case: str) -> None:
    world_size, traffic, expected = CASES[case]
    inferred = infer_layout(world_size, traffic)
    assert inferred.fields == expected
    assert Layout(**inferred.fields).world_size == world_size


def test_a_layout_that_the_traffic_does_not_prove_is_an_assumption() -> None:
    assert infer_layout(4, [reduce_gradients("world", 4)]).assumptions == (
        "Group 'world' of 4 ranks is assumed to be dp, because of its all_reduce.",
    )
    assert infer_layout(2, SEND).assumptions == ("The schedule is assumed to be 1F1B.",)
    assert "ZeRO-1" in infer_layout(2, shard("dp", 2, 10)).assumptions[0]
    assert infer_layout(4, shard("dp", 4, 19)).assumptions == ()


@pytest.mark.parametrize(("bytes_per_parameter", "is_dp"), [(4, True), (2, True), (2.1, True), (3, False), (40, False)])
def test_an_unnamed_all_reduce_is_dp_only_if_it_carries_the_gradients(bytes_per_parameter: float, is_dp: bool) -> None:
    num_parameters = round(100 * MIB / bytes_per_parameter)
    traffic = [reduce_gradients("world", 4)]
    if is_dp:
        assert infer_layout(4, traffic, num_parameters).fields == {"dp": 4}
        return
    with pytest.raises(CannotInferError, match=r"group 'world' does not have the size of the model's gradients\. Set"):
        infer_layout(4, traffic, num_parameters)


def test_a_stage_has_a_part_of_the_gradients() -> None:
    stages = [row._replace(label="ranks 0-1") for row in SEND]
    traffic = [reduce_gradients("ranks 0,2", 2), *stages]
    assert infer_layout(4, traffic, 50 * MIB).fields == {"pp": 2, "dp": 2}


@pytest.mark.parametrize(
    ("world_size", "traffic", "found"),
    [
        (8, [reduce_gradients("tp", 2)], r"2 of 8 ranks \(tp 2\)"),
        (4, [], r"1 of 4 ranks \(no group\)"),
        (4, [reduce_gradients("tp", 4), reduce_gradients("dp", 2)], r"8 of 4 ranks \(dp 2 x tp 4\)"),
    ],
)
def test_unexplained_ranks_are_an_error(world_size: int, traffic: list[GroupTraffic], found: str) -> None:
    with pytest.raises(CannotInferError, match=rf"{found}\. Set `script\.plan\.layout`\."):
        infer_layout(world_size, traffic)
