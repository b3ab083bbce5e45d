"""Compare the kernel's byte counters with the meter: ranks in network namespaces, `ss -ti` before and after."""

from __future__ import annotations

import os

import pytest

from tests.witness.compare import (
    LAYOUTS,
    ConnectionComparison,
    WorkComparison,
    build_training_request,
    list_primitive_requests,
    run_requests,
)

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
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[WorkComparison]:
    return run_requests(
        [list_primitive_requests(GROUPS, SIZES), *map(build_training_request, LAYOUTS)],
        tmp_path_factory.mktemp("witness") / "out",
    )


@needs_root
@pytest.mark.parametrize("members", GROUPS, ids=["3 hosts", "4 hosts"])
@pytest.mark.parametrize("op", OPS)
def test_connections_carry_the_metered_bytes(seen: list[WorkComparison], op: str, members: list[int]) -> None:
    found = [s for s in seen if s.name == op and s.hosts == len(members)]
    assert len(found) == len(SIZES)
    for s in found:
        assert s.passed, s.worst


@needs_root
def test_connections_of_a_barrier_carry_only_headers(seen: list[WorkComparison]) -> None:
    found = [s for s in seen if s.name == "barrier"]
    assert len(found) == len(GROUPS)
    assert all(s.exact == len(s.pairs) > 0 for s in found)


@needs_root
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_connections_of_a_training_run_carry_the_metered_bytes(seen: list[WorkComparison], name: str) -> None:
    (found,) = [s for s in seen if s.name == name]
    assert sum(pair.modelled for pair in found.pairs) > 10e6
    assert found.passed, found.worst


@pytest.mark.parametrize(
    "wrong",
    [
        ConnectionComparison(0, 1, "0", 10_000, 10_101),
        ConnectionComparison(0, 1, "0", 10_000, 9_899),
        ConnectionComparison(0, 1, "0", 0, 48),
        ConnectionComparison(0, 1, "0", 48, 0),
    ],
)
def test_one_error_above_one_percent_fails_the_comparison(wrong: ConnectionComparison) -> None:
    right = ConnectionComparison(1, 0, "0", 10_000, 10_099)
    assert WorkComparison("all_reduce", 2, 0, [right]).passed
    assert not WorkComparison("all_reduce", 2, 0, [right, wrong]).passed
