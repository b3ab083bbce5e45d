"""The kernel's own count of bytes agrees with the meter's: ranks on network namespaces, `ss -ti` before and after."""

from __future__ import annotations

import os

import pytest

from tests.witness.compare import LAYOUTS, Pair, Seen, primitives, training, watch

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
)
GROUPS = [[0, 2, 3], [0, 1, 2, 3]]
SIZES = [64 * 2**10, 3 * 2**20]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


pytestmark = pytest.mark.slow  # and `make witness`, which prints the table


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return watch([primitives(GROUPS, SIZES), *map(training, LAYOUTS)], tmp_path_factory.mktemp("witness") / "out")


@needs_root
@pytest.mark.parametrize("members", GROUPS, ids=["3 hosts", "4 hosts"])
@pytest.mark.parametrize("op", OPS)
def test_each_connection_carries_what_the_meter_says(seen: list[Seen], op: str, members: list[int]) -> None:
    found = [s for s in seen if s.name == op and s.hosts == len(members)]
    assert len(found) == len(SIZES)
    for s in found:
        assert s.passed, s.worst


@needs_root
def test_each_connection_of_a_barrier_carries_headers_alone(seen: list[Seen]) -> None:
    found = [s for s in seen if s.name == "barrier"]
    assert len(found) == len(GROUPS)
    assert all(s.exact == len(s.pairs) > 0 for s in found)


@needs_root
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_each_connection_of_a_training_run_carries_what_the_meter_says(seen: list[Seen], name: str) -> None:
    (found,) = [s for s in seen if s.name == name]
    assert sum(pair.modelled for pair in found.pairs) > 10e6
    assert found.passed, found.worst


@pytest.mark.parametrize(
    "wrong",
    [Pair(0, 1, "0", 10_000, 10_101), Pair(0, 1, "0", 10_000, 9_899), Pair(0, 1, "0", 0, 48), Pair(0, 1, "0", 48, 0)],
)
def test_one_connection_more_than_a_hundredth_off_fails_them_all(wrong: Pair) -> None:
    right = Pair(1, 0, "0", 10_000, 10_099)
    assert Seen("all_reduce", 2, 0, [right]).passed
    assert not Seen("all_reduce", 2, 0, [right, wrong]).passed
