"""On NCCL no layout's ranks wait for one another for ever, and all of a group ask for the same in one order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner.facts.spec import JobSpec
from tests.parity.cases import LAYOUTS, Case, make_spec
from tests.workers.trainer.parallel.device_order import Call, Connect, Played, Trace, Wait, traces
from workers.dry_run import rank as dry_rank
from workers.trainer.parallel.data_parallel import BucketedAllReduce
from workers.trainer.parallel.mesh import make_mesh

QUICK = (
    *(f"pp4 {name}" for name in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipev")),
    "pp4 interleaved_zero_bubble",
    "cp4 ring",
    "cp4 all-gather",
    "tp4 sp one kv head",
    "hsdp zero3 2x2 x tp2",
    "ep2 x pp2 x tp2 sp",
    "pp2 x zero3 dp2 x tp2 sp",
    "pp2 zbv x zero1 dp2 x tp2",
    "pp2 kept looped_bfs x zero3 ep2 x dp2",
)


def spec_of(name: str) -> JobSpec:
    return Case(LAYOUTS[name].archs[-1], name).spec


assert set(QUICK) <= set(LAYOUTS)
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_every_call_meets_its_like_and_no_ring_waits(name: str) -> None:
    played = Played(traces(spec_of(name)))
    assert played.unlike() == []
    assert played.stuck() == []


def send(peer: int) -> Call:
    return Call("send", "forward", 2, peer, 8, at_once=False, batch=None)


def receive(peer: int) -> Call:
    return Call("recv", "forward", 2, peer, 8, at_once=False, batch=None)


def test_two_that_send_first_and_receive_then_wait_for_ever() -> None:
    facing: list[Trace] = [[send(1), receive(1)], [send(0), receive(0)]]
    assert len(Played(facing).stuck()) == 2
    batched: list[Trace] = [[call._replace(batch=0) for call in trace if isinstance(call, Call)] for trace in facing]
    assert Played(batched).stuck() == []
    in_turn: list[Trace] = [[send(1), Wait((0,)), receive(1)], [receive(0), Wait((0,)), send(0)]]
    assert Played(in_turn).stuck() == []


def test_groups_in_unlike_orders_wait_for_ever() -> None:
    one, other = (Call("all_reduce", name, 2, None, 8, at_once=True, batch=None) for name in ("tp", "dp"))
    assert Played([[one, other], [one, other]]).stuck() == []
    assert Played([[one, other], [other, one]]).stuck()  # communicators are not even made
    met: Trace = [Connect(name, 2, None) for name in ("tp", "dp")]
    assert Played([[*met, one, other], [*met, one, other]]).stuck() == []
    assert len(Played([[*met, one, other], [*met, other, one]]).stuck()) == 2
    assert Played([[one], [one._replace(payload_bytes=16)]]).unlike()
    assert Played([[one], []]).unlike()


def test_both_directions_of_a_pipe_on_one_group_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_group(*given: Any) -> Any:
        mesh = make_mesh(*given)
        return replace(mesh, backward=mesh.forward)

    monkeypatch.setattr(dry_rank, "make_mesh", one_group)
    assert Played(traces(spec_of("pp4 1f1b"))).stuck()


def without(found: list[Trace], unwanted: Callable[[Connect], bool]) -> list[Trace]:
    """In place of what is not wanted stands a wait for nothing, so that calls keep their places."""
    return [[Wait(()) if isinstance(one, Connect) and unwanted(one) else one for one in trace] for trace in found]


def test_stages_that_meet_at_their_first_messages_wait_for_ever() -> None:
    """One waits for the other's first receive from it, and the other likewise: as every pipe did until 2026-11."""
    found = traces(spec_of("pp2 1f1b"))
    assert Played(found).stuck() == []
    assert Played(without(found, lambda one: one.peer is not None)).stuck()


def test_a_pipe_of_four_whose_messages_share_a_communicator_waits_for_ever() -> None:
    """A receive that is posted ahead keeps back the sends behind it: no group of messages is connected as a whole."""
    found = traces(spec_of("pp4 1f1b"))
    groups = {one.group for one in found[0] if isinstance(one, Connect) and one.peer is not None}
    whole: list[Trace] = [[*(Connect(group, 4, None) for group in sorted(groups)), *_later(trace)] for trace in found]
    assert Played(found).stuck() == []
    assert Played(whole).stuck()


def _later(trace: Trace) -> Trace:
    """The same behind two more."""
    return [Wait(tuple(call + 2 for call in one.calls)) if isinstance(one, Wait) else one for one in trace]


def test_a_bucket_that_is_cut_otherwise_on_one_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = BucketedAllReduce._launch

    def one_rank_goes_its_own_way(self: Any, bucket: Any) -> None:
        launched(self, bucket[: len(bucket) - self._group.rank()])

    monkeypatch.setattr(BucketedAllReduce, "_launch", one_rank_goes_its_own_way)
    assert Played(traces(make_spec("llama", {"dp": 2}, 1))).unlike()
