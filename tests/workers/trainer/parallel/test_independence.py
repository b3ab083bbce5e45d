"""Trainer and planner compute traffic independently, so a fault on either side shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from planner.cost import axis_traffic, traffic
from planner.facts.spec import JobSpec
from tests.parity.cases import Case
from tests.workers.test_dry_run import wrong
from workers.dry_run import run_dry_step
from workers.trainer import optimizer
from workers.trainer.parallel import mesh, parallelize

SP, HEADS, PLAIN = Case("gpt", "tp2 sp"), Case("llama", "tp2 one kv head"), Case("gpt", "dp2")


class Fault(NamedTuple):
    """Store a replacement of a function, and a case that it affects."""

    case: Case
    module: Any
    name: str
    instead: Callable[..., Any]


FAULTS = {
    "the trainer sums no gradient over tp": Fault(SP, optimizer, "is_partial_over_tp", lambda *_: False),
    "the planner expects no such sum": Fault(SP, traffic, "_is_partial_over_tp", lambda *_: False),
    "the trainer sums no shared heads": Fault(HEADS, mesh, "count_kv_replicas", lambda *_: 1),
    "the planner expects none": Fault(HEADS, traffic, "count_kv_replicas", lambda *_: 1),
    "the planner forgets a tensor": Fault(
        PLAIN, axis_traffic, "_order_by_backward", lambda units: [p for u in units[1:] for p in u.parameters]
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_of_one_side_shows_in_bytes_and_calls(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(fault.case.spec, run_dry_step(fault.case.spec, 0)) == []
    axis_traffic._count_buckets.cache_clear()
    monkeypatch.setattr(fault.module, fault.name, fault.instead)
    assert wrong(fault.case.spec, run_dry_step(fault.case.spec, 0)) != []
    axis_traffic._count_buckets.cache_clear()


def test_a_unit_that_lacks_a_tensor_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    units = parallelize.get_chunk_units

    def without_embedding(*model: Any, **ends: Any) -> list[Any]:
        return [
            unit._replace(parameters=tuple(p for p in unit.parameters if p.name != "embedding.weight"))
            for unit in units(*model, **ends)
        ]

    monkeypatch.setattr(parallelize, "get_chunk_units", without_embedding)
    with pytest.raises(KeyError):
        run_dry_step(PLAIN.spec, 0)


def test_a_placement_that_the_model_does_not_have_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    local = parallelize.get_local_parameter

    def halved(model: Any, layout: Any, parameter: Any) -> Any:
        found = local(model, layout, parameter)
        return found._replace(shape=(found.shape[0] // 2, *found.shape[1:])) if "attention.k." in found.name else found

    monkeypatch.setattr(parallelize, "get_local_parameter", halved)
    spec: JobSpec = HEADS.spec
    with pytest.raises(AssertionError, match=r"attention\.k\.weight"):
        run_dry_step(spec, 0)
