"""Four real gloo ranks: every collective counted once, to the byte, and none changed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.workers.meter.ranks import SLOW_S

WORLD = 4
ROOT = Path(__file__).parents[3]
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What each rank said after all its checks."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "tests.workers.meter.ranks"]
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(port), str(folder / f"{rank}.json")],
            cwd=ROOT,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]
    try:
        deadline = time.monotonic() + 120
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [(folder / f"{rank}.json") for rank in range(WORLD)]
    assert all(output.exists() for output in outputs), "\n".join(Path(log.name).read_text() for log in logs)
    return [json.loads(output.read_text()) for output in outputs]


def exact(counted: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Without the durations."""
    return {key: change[:3] for key, change in counted.items()}


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


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("variant", [*PAYLOAD, "all_gather list", "reduce_scatter list", "all_to_all list"])
def test_a_collective_counts_once_with_its_full_payload_and_its_result_is_unchanged(ranks, mode, variant):
    op = variant.split()[0]
    for said in ranks:
        result = said["collectives"][f"{mode} {variant}"]
        assert exact(result["counted"]) == {f"{op} world {WORLD}": [1, 1, PAYLOAD[op]]}
        assert result["right"]


def test_of_an_uneven_all_to_all_counts_what_leaves_the_rank(ranks):
    for rank, said in enumerate(ranks):
        leaves = (WORLD - 1) * (rank + 1) * 8
        assert said["uneven"]["counted"] == [leaves + 5 * 8, leaves]
        assert said["uneven"]["right"]


def test_a_coalesced_call_counts_once_with_all_its_buffers(ranks):
    for said in ranks:
        assert exact(said["coalesced"]["all_reduce"]) == {f"all_reduce world {WORLD}": [1, 1, 2 * SHARE]}
        assert exact(said["coalesced"]["all_gather"]) == {f"all_gather world {WORLD}": [1, 1, 2 * FULL]}
        assert said["coalesced"]["all_reduce right"]
        assert said["coalesced"]["all_gather right"]


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
def test_functional_collectives_are_counted_like_direct_ones(ranks, op, payload):
    for said in ranks:
        assert exact(said["functional"][op]) == {f"{op} world {WORLD}": [1, 1, payload]}
        assert said["functional"]["right"]


def test_sends_and_receives_count_on_their_own_side(ranks):
    both = {f"send world {WORLD}": [1, 1, SHARE], f"recv world {WORLD}": [1, 1, SHARE]}
    for rank, said in enumerate(ranks):
        p2p = said["point_to_point"]
        assert exact(p2p["isend irecv"]) == both
        assert exact(p2p["batch"]) == both
        side = "recv" if rank % 2 else "send"
        assert exact(p2p["blocking, from anyone"]) == {f"{side} world {WORLD}": [1, 1, SHARE]}
        assert p2p["right"]
        assert p2p["batch right"]
        assert p2p["anyone right"]


def test_object_collectives_count_what_they_really_send(ranks):
    for said in ranks:
        ((key, (count, completed, payload)),) = exact(said["objects"]["counted"]).items()
        assert key == f"all_gather world {WORLD}"
        assert count == completed == 2  # the sizes, 8 bytes each, then the pickles
        assert payload > WORLD * 8
        assert said["objects"]["right"]


def test_a_mesh_labels_its_axes_and_a_plain_group_waits_for_a_label(ranks):
    for said in ranks:
        assert exact(said["axes"]["mesh"]) == {"all_reduce tp 2": [2, 2, 2 * SHARE], "all_reduce dp 2": [1, 1, SHARE]}
        assert exact(said["axes"]["unlabelled"]) == {"all_reduce world 2": [1, 1, SHARE]}
        assert exact(said["axes"]["labelled"]) == {"all_reduce pp 2": [1, 1, SHARE]}


def test_a_duration_lasts_from_the_issue_to_the_end(ranks):
    for rank, said in enumerate(ranks):
        (count, _, _, busy_s) = said["late_rank"]["counted"][f"all_reduce world {WORLD}"]
        assert count == 1
        assert 0 < busy_s <= said["late_rank"]["wall_s"]
        if rank:
            assert busy_s > SLOW_S / 2


def test_every_record_is_complete_and_positive(ranks):
    for said in ranks:
        assert len(said["records"]) > 60
        assert all(0 < record["duration_s"] < 60 for record in said["records"])
        assert all(abs(record["start"] - time.time()) < 600 for record in said["records"])


def test_a_collective_completes_in_the_phase_it_was_issued_in(ranks):
    for said in ranks:
        assert said["phases"] == {
            "step recv": [1, 1, SHARE],
            "eval recv": None,
            "step send": None,
            "eval send": [1, 1, SHARE],
        }


def test_ddp_sends_the_bytes_of_its_parameters(ranks):
    for said in ranks:
        counted = exact(said["ddp"]["counted"])
        assert counted.keys() == {f"all_reduce world {WORLD}"}
        count, completed, payload = counted[f"all_reduce world {WORLD}"]
        assert payload == said["ddp"]["bytes"] == (64 * 128 + 128 + 128 * 64 + 64) * 4
        assert count == completed
        assert said["ddp"]["right"]


def test_zero3_gathers_twice_and_scatters_once_the_bytes_of_its_parameters(ranks):
    for said in ranks:
        size = said["zero3"]["bytes"]
        assert exact(said["zero3"]["counted"]) == {
            f"all_gather world {WORLD}": [4, 4, 2 * size],
            f"reduce_scatter world {WORLD}": [2, 2, size],
        }
        assert said["zero3"]["right"]


def test_tensor_parallel_reduces_its_output_over_its_axis(ranks):
    for said in ranks:
        assert exact(said["tensor_parallel"]["counted"]) == {
            "all_reduce tp 2": [1, 1, said["tensor_parallel"]["output_bytes"]]
        }
        assert said["tensor_parallel"]["right"]
