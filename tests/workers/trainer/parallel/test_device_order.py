"""No layout deadlocks on NCCL, and all ranks of a group call in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.facts.pipeline_messages import Exchange, order_exchanges
from planner.facts.spec import JobSpec, Layout
from tests.parity.cases import LAYOUTS, Case, make_spec
from tests.workers.trainer.parallel.device_order import Call, Connect, ReplayedStep, Trace, Wait, record_traces
from workers.trainer.parallel import pipeline_parallel
from workers.trainer.parallel.data_parallel import BucketedAllReduce

QUICK = (
    "pp4 1f1b",
    "pp4 zbv",
    "cp4 ring",
    "tp4 sp one kv head",
    "ep2 x pp2 x tp2 sp",
    "pp2 zbv x zero1 dp2 x tp2",
)
EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in QUICK[2:]]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in QUICK]


def make_spec_for(name: str) -> JobSpec:
    return Case(LAYOUTS[name].archs[-1], name).spec


assert set(QUICK) <= set(LAYOUTS)


@pytest.mark.parametrize("name", [*QUICK[:2], *EXTENDED, *OTHERS])
def test_every_call_has_a_counterpart_and_no_cycle(name: str) -> None:
    found = record_traces(make_spec_for(name))
    played = ReplayedStep(found)
    assert played.unlike() == []
    assert played.stuck() == []
    assert ReplayedStep(found, one_queue=True).stuck() == []


def send(peer: int) -> Call:
    return Call("send", "forward", 2, peer, 8, at_once=False, batch=None)


def receive(peer: int) -> Call:
    return Call("recv", "forward", 2, peer, 8, at_once=False, batch=None)


def test_two_ranks_that_send_before_they_receive_deadlock() -> None:
    facing: list[Trace] = [[send(1), receive(1)], [send(0), receive(0)]]
    assert len(ReplayedStep(facing).stuck()) == 2
    batched: list[Trace] = [[call._replace(batch=0) for call in trace if isinstance(call, Call)] for trace in facing]
    assert ReplayedStep(batched).stuck() == []
    in_turn: list[Trace] = [[send(1), Wait((0,)), receive(1)], [receive(0), Wait((0,)), send(0)]]
    assert ReplayedStep(in_turn).stuck() == []


def test_receive_posted_before_its_dependency_deadlocks_in_one_queue() -> None:
    """Pipelines deadlocked like this on a GPU until 2026-11."""
    met: Trace = [Connect(name, 2, None) for name in ("forward", "backward")]
    sends = [*met, send(1), receive(1)._replace(group="backward")]
    answers = [*met, receive(0), Wait((2,)), send(0)._replace(group="backward")]
    ahead = [*met, sends[3], sends[2]]
    assert ReplayedStep([ahead, answers]).stuck() == []
    assert len(ReplayedStep([ahead, answers], one_queue=True).stuck()) == 2
    assert ReplayedStep([sends, answers], one_queue=True).stuck() == []


def test_groups_in_different_orders_deadlock() -> None:
    one, other = (Call("all_reduce", name, 2, None, 8, at_once=True, batch=None) for name in ("tp", "dp"))
    assert ReplayedStep([[one, other], [one, other]]).stuck() == []
    assert ReplayedStep([[one, other], [other, one]]).stuck()  # communicators are not even created
    met: Trace = [Connect(name, 2, None) for name in ("tp", "dp")]
    assert ReplayedStep([[*met, one, other], [*met, one, other]]).stuck() == []
    assert len(ReplayedStep([[*met, one, other], [*met, other, one]]).stuck()) == 2
    assert ReplayedStep([[one], [one._replace(payload_bytes=16)]]).unlike()
    assert ReplayedStep([[one], []]).unlike()


def ahead(layout: Layout, micro_batches: int, *, forwards: bool = False) -> list[list[list[Exchange]]]:
    """Let each stage request its first message at once."""
    found = [list(map(list, slots)) for slots in order_exchanges(layout, micro_batches, forwards=forwards)]
    for stage, slots in enumerate(found):
        arriving = [(index, one) for index, slot in enumerate(slots) for one in slot if one.receiver == stage]
        for index, first in arriving[:1]:
            slots[index].remove(first)
            slots[0].insert(0, first)
    return found


def test_pipeline_that_receives_ahead_deadlocks_in_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReplayedStep(record_traces(make_spec_for("pp2 1f1b")), one_queue=True).stuck() == []
    monkeypatch.setattr(pipeline_parallel, "order_exchanges", ahead)
    found = record_traces(make_spec_for("pp2 1f1b"))
    assert ReplayedStep(found).stuck() == []
    assert ReplayedStep(found, one_queue=True).stuck()


def without(found: list[Trace], unwanted: Callable[[Connect], bool]) -> list[Trace]:
    """Replace unwanted calls with an empty wait, so the positions of calls stay."""
    return [[Wait(()) if isinstance(one, Connect) and unwanted(one) else one for one in trace] for trace in found]


def test_stages_that_connect_at_their_first_messages_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage waits for the first receive of the other. Every pipeline deadlocked like this until 2026-11."""
    monkeypatch.setattr(pipeline_parallel, "order_exchanges", ahead)
    found = record_traces(make_spec_for("pp2 1f1b"))
    assert ReplayedStep(found).stuck() == []
    assert ReplayedStep(without(found, lambda one: one.peer is not None)).stuck()


def test_bucket_with_a_different_cut_on_one_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = BucketedAllReduce._launch

    def one_rank_goes_its_own_way(self: Any, bucket: Any) -> None:
        launched(self, bucket[: len(bucket) - self._group.rank()])

    monkeypatch.setattr(BucketedAllReduce, "_launch", one_rank_goes_its_own_way)
    assert ReplayedStep(record_traces(make_spec("llama", {"dp": 2}, 1))).unlike()
