"""Bytes that gloo sends on each connection, compared with closed forms. tests/witness reads the kernel's counters."""

from __future__ import annotations

import pytest

from contracts.telemetry.items import Op
from tests.support.gloo_messages import gloo_bytes

MIB = 2**20
ROOTED: tuple[Op, ...] = ("broadcast", "reduce", "gather", "scatter", "send", "recv")


def count_sent_bytes(op: Op, payload: int, members: list[int], root: int | None = None) -> dict[tuple[int, int], int]:
    """Return the bytes by (from, to) of the whole group."""
    return {
        (rank, peer): total for rank in members for peer, total in gloo_bytes(op, payload, members, rank, root).items()
    }


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("op", "share"),
    [("all_reduce", 2.0), ("reduce_scatter", 2.0), ("all_gather", 1.0), ("all_to_all", 1.0)],
)
def test_rank_sends_ring_bytes_and_headers(op: Op, share: float, size: int) -> None:
    payload = 84 * MIB
    for rank in range(size):
        total = sum(gloo_bytes(op, payload, range(size), rank).values())
        assert total == pytest.approx(share * (size - 1) / size * payload, rel=1e-3)
        assert total > share * (size - 1) / size * payload


def test_reductions_go_backward_around_the_group_and_gathers_forward() -> None:
    members = [5, 2, 9]
    for op, ahead in (("all_reduce", {(5, 9), (9, 2), (2, 5)}), ("all_gather", {(5, 2), (2, 9), (9, 5)})):
        found = count_sent_bytes(op, 3 * MIB, members)  # type: ignore[arg-type]
        assert {pair for pair, total in found.items() if total > MIB / 2} == ahead
        assert len(found) == 6  # requests go in the other direction


def test_small_message_costs_its_headers() -> None:
    # 2 ranks send 2 segments each way twice. Each segment has an announcement, a request and a header.
    assert count_sent_bytes("all_reduce", 16, [0, 1]) == {(0, 1): 16 + 4 * 144, (1, 0): 16 + 4 * 144}
    # two float64 fill two segments of the four
    assert gloo_bytes("all_reduce", 16, [0, 1], 0, element_bytes=8) == {1: 16 + 2 * 144}


def test_broadcast_follows_a_tree_from_its_root() -> None:
    members = [0, 1, 2, 3]
    carried = {pair for pair, total in count_sent_bytes("broadcast", MIB, members, root=1).items() if total > MIB}
    assert carried == {(1, 2), (1, 3), (2, 0)}


def test_reduce_ends_at_its_root_and_sends_more_than_the_minimum() -> None:
    exact = count_sent_bytes("reduce", 4 * MIB, [0, 1], root=0)
    assert exact == {(0, 1): 2 * MIB + 2 * 96 + 3 * 48, (1, 0): 4 * MIB + 3 * 96 + 2 * 48}
    more = count_sent_bytes("reduce", 12 * MIB, [0, 1], root=0)  # 12 segments: all except two travel around the ring
    assert more[0, 1] == 10 * MIB + 10 * 96 + 11 * 48
    assert more[1, 0] == 16 * MIB + 11 * 96 + 10 * 48


def test_other_operations_send_directly() -> None:
    assert count_sent_bytes("gather", 3 * MIB, [0, 1, 2], root=2) == {
        (0, 2): MIB + 96,
        (1, 2): MIB + 96,
        (2, 0): 48,
        (2, 1): 48,
    }
    assert count_sent_bytes("scatter", 2 * MIB, [4, 6], root=6) == {(6, 4): MIB + 96, (4, 6): 48}
    assert gloo_bytes("send", MIB, [0, 1, 2], 0, root=2) == {2: MIB + 96}
    assert gloo_bytes("recv", MIB, [0, 1, 2], 2, root=0) == {0: 48}
    assert gloo_bytes("barrier", 0, [0, 1, 2], 0) == {1: 96 + 48, 2: 96 + 48}


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "barrier"])
def test_group_of_one_sends_nothing(op: Op) -> None:
    assert gloo_bytes(op, MIB, [3], 3, root=3) == {}


def test_empty_reduction_sends_nothing() -> None:
    assert gloo_bytes("all_reduce", 0, [0, 1], 0) == gloo_bytes("reduce", 0, [0, 1], 0, root=0) == {}


def test_rank_outside_the_group_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is not in the group \[0, 1\]"):
        gloo_bytes("all_reduce", 8, [0, 1], 2)


@pytest.mark.parametrize("op", ROOTED)
def test_missing_root_is_rejected(op: Op) -> None:
    with pytest.raises(ValueError, match=rf"{op} needs a root .* got None"):
        gloo_bytes(op, 8, [0, 1], 0)
