"""Four gloo ranks: every collective is counted once, to the byte, and its result is unchanged."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.workers.meter.ranks import SLOW_S

WORLD = 4
RankOutput = list[dict[str, Any]]
SHARE = 8 * 4  # bytes of each rank's 8 floats
FULL = SHARE * WORLD
PAYLOAD = {
    "all_reduce": SHARE,
    "broadcast": SHARE,
    "reduce": SHARE,
    "all_gather": FULL,
    "reduce_scatter": FULL,
    "all_to_all": SHARE,
    "gather": FULL,
    "scatter": FULL,
    "barrier": 0,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankOutput:
    """Return the results of all checks by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_ranks(WORLD, "tests.workers.meter.ranks", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def exact(counted: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Remove the durations."""
    return {key: change[:3] for key, change in counted.items()}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("variant", [*PAYLOAD, "all_gather list", "reduce_scatter list", "all_to_all list"])
def test_collective_counts_once_with_full_payload(ranks, mode, variant):
    op = variant.split()[0]
    for messages in ranks:
        result = messages["collectives"][f"{mode} {variant}"]
        assert exact(result["counted"]) == {f"{op} world {WORLD}": [1, 1, PAYLOAD[op]]}
        assert result["right"]


def test_uneven_all_to_all_counts_sent_bytes(ranks):
    for rank, messages in enumerate(ranks):
        leaves = (WORLD - 1) * (rank + 1) * 8
        assert messages["uneven"]["counted"] == [leaves + 5 * 8, leaves]
        assert messages["uneven"]["right"]


def test_coalesced_call_counts_once_with_all_buffers(ranks):
    for messages in ranks:
        assert exact(messages["coalesced"]["all_reduce"]) == {f"all_reduce world {WORLD}": [1, 1, 2 * SHARE]}
        assert exact(messages["coalesced"]["all_gather"]) == {f"all_gather world {WORLD}": [1, 1, 2 * FULL]}
        assert messages["coalesced"]["all_reduce right"]
        assert messages["coalesced"]["all_gather right"]


@pytest.mark.parametrize(
    ("op", "payload"),
    [
        ("all_reduce", SHARE),
        ("all_gather", FULL),
        ("reduce_scatter", SHARE),
        ("all_to_all", SHARE),
        ("broadcast", SHARE),
    ],
)
def test_counts_functional_collectives(ranks, op, payload):
    for messages in ranks:
        assert exact(messages["functional"][op]) == {f"{op} world {WORLD}": [1, 1, payload]}
        assert messages["functional"]["right"]


def test_counts_sends_and_receives_on_their_own_rank(ranks):
    both = {f"send world {WORLD}": [1, 1, SHARE], f"recv world {WORLD}": [1, 1, SHARE]}
    for rank, messages in enumerate(ranks):
        p2p = messages["point_to_point"]
        assert exact(p2p["isend irecv"]) == both
        assert exact(p2p["batch"]) == both
        side = "recv" if rank % 2 else "send"
        assert exact(p2p["blocking, from anyone"]) == {f"{side} world {WORLD}": [1, 1, SHARE]}
        assert p2p["right"]
        assert p2p["batch right"]
        assert p2p["anyone right"]


def test_counts_object_collectives(ranks):
    for messages in ranks:
        ((key, (count, completed, payload)),) = exact(messages["objects"]["counted"]).items()
        assert key == f"all_gather world {WORLD}"
        assert count == completed == 2  # the sizes, 8 bytes each, then the pickles
        assert payload > WORLD * 8
        assert messages["objects"]["right"]


def test_mesh_labels_its_groups(ranks):
    for messages in ranks:
        assert exact(messages["axes"]["mesh"]) == {
            "all_reduce tp 2": [2, 2, 2 * SHARE],
            "all_reduce dp 2": [1, 1, SHARE],
        }
        assert exact(messages["axes"]["unlabelled"]) == {"all_reduce world 2": [1, 1, SHARE]}
        assert exact(messages["axes"]["labelled"]) == {"all_reduce pp 2": [1, 1, SHARE]}


def test_duration_includes_wait_for_late_rank(ranks):
    for rank, messages in enumerate(ranks):
        (count, _, _, busy_s) = messages["late_rank"]["counted"][f"all_reduce world {WORLD}"]
        assert count == 1
        assert 0 < busy_s <= messages["late_rank"]["wall_s"]
        if rank:
            assert busy_s > SLOW_S / 2


def called(messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of the traced step with their groups."""
    report = messages["step"]["told"]
    calls = [dict(zip(report["calls"], row, strict=True)) for row in zip(*report["calls"].values(), strict=True)]
    return [call | {"group": report["groups"][call["group"]]} for call in calls]


def test_collective_has_equal_group_and_sequence_number_on_all_ranks(ranks):
    seen: dict[str, list[int]] = {}
    for rank, messages in enumerate(ranks):
        for call in called(messages):
            if call["peer"] == -1:
                assert rank in call["group"]["ranks"]
                seen.setdefault(f"{call['group']} {call['op']} {call['sequence']}", []).append(rank)
    assert len(seen) == 1 + 2 + 2  # of the world, of each dp pair, of each tp pair's second group
    assert all(str(sorted(found)) in key for key, found in seen.items()), seen
    assert [call["group"] for call in called(ranks[3])[:3]] == [
        {"axis": "world", "ranks": [0, 1, 2, 3], "nth": 0},
        {"axis": "dp", "ranks": [1, 3], "nth": seen_before("dp")},
        {"axis": "tp", "ranks": [2, 3], "nth": seen_before("tp") + 1},
    ]


def seen_before(axis: str) -> int:
    """Return the number of groups with equal ranks and axis that earlier checks created."""
    return {"dp": 1, "tp": 1}[axis]


def test_send_and_receive_have_equal_sequence_numbers(ranks):
    ends: dict[str, list[tuple[int, int, int]]] = {"send": [], "recv": []}
    for rank, messages in enumerate(ranks):
        for call in called(messages):
            if call["op"] in ends:
                way = (rank, call["peer"]) if call["op"] == "send" else (call["peer"], rank)
                ends[call["op"]].append((*way, call["sequence"]))
    assert len(ends["send"]) == 2 * WORLD
    assert sorted(ends["send"]) == sorted(ends["recv"])


def test_only_waiting_ranks_have_exposed_time(ranks):
    for rank, messages in enumerate(ranks):
        late, beside, *_ = called(messages)
        assert 0 <= late["blocked_us"] <= late["ended_us"] - late["issued_us"]
        if rank:
            assert late["blocked_us"] > SLOW_S / 2 * 1e6
            assert messages["step"]["parts"]["exposed"]["world"] > SLOW_S / 2
        else:
            assert late["issued_us"] > SLOW_S * 1e6
            assert late["blocked_us"] < SLOW_S / 2 * 1e6
        assert beside["ended_us"] > beside["issued_us"]


def test_step_breakdown_does_not_exceed_step_time(ranks):
    for messages in ranks:
        parts, report = messages["step"]["parts"], messages["step"]["told"]
        assert 0.02 <= parts["data"] < SLOW_S
        assert parts["data"] + sum(parts["exposed"].values()) <= report["step_s"]
        assert {"world", "tp"} <= parts["exposed"].keys() <= {"world", "tp", "dp"}
        calls = called(messages)
        for axis, exposed_s in parts["exposed"].items():
            blocked_us = sum(call["blocked_us"] for call in calls if call["group"]["axis"] == axis)
            assert abs(exposed_s - blocked_us / 1e6) < 1e-4
        way_s = sum(c["ended_us"] - c["issued_us"] for c in calls if c["group"]["axis"] == "dp") / 1e6
        assert abs(parts["hidden"].get("dp", 0) - (way_s - parts["exposed"].get("dp", 0))) < 1e-3
    assert report["spans"]["work"] == ["data", "forward"]
    assert (report["spans"]["chunk"], report["spans"]["micro_batch"]) == ([-1, 2], [-1, 3])
    assert all(
        to - began > 15_000 for began, to in zip(report["spans"]["from_us"], report["spans"]["to_us"], strict=True)
    )


def test_every_record_has_positive_values(ranks):
    for messages in ranks:
        assert len(messages["records"]) > 20  # since the step
        assert all(0 < record["duration_s"] < 60 for record in messages["records"])
        assert all(abs(record["start"] - time.time()) < 600 for record in messages["records"])


def test_collective_completes_in_phase_of_issue(ranks):
    for messages in ranks:
        assert messages["phases"] == {
            "step recv": [1, 1, SHARE],
            "eval recv": None,
            "step send": None,
            "eval send": [1, 1, SHARE],
        }


def test_ddp_all_reduces_bytes_of_its_parameters(ranks):
    for messages in ranks:
        counted = exact(messages["ddp"]["counted"])
        assert counted.keys() == {f"all_reduce world {WORLD}"}
        count, completed, payload = counted[f"all_reduce world {WORLD}"]
        assert payload == messages["ddp"]["bytes"] == (64 * 128 + 128 + 128 * 64 + 64) * 4
        assert count == completed
        assert messages["ddp"]["right"]


def test_zero3_gathers_parameters_twice_and_scatters_gradients_once(ranks):
    for messages in ranks:
        size = messages["zero3"]["bytes"]
        assert exact(messages["zero3"]["counted"]) == {
            f"all_gather world {WORLD}": [4, 4, 2 * size],
            f"reduce_scatter world {WORLD}": [2, 2, size],
        }
        assert messages["zero3"]["right"]


def test_tensor_parallel_all_reduces_output_over_its_axis(ranks):
    for messages in ranks:
        assert exact(messages["tensor_parallel"]["counted"]) == {
            "all_reduce tp 2": [1, 1, messages["tensor_parallel"]["output_bytes"]]
        }
        assert messages["tensor_parallel"]["right"]
