"""Reject benchmarks whose buffers exceed the memory of every host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Host
from jobs.queue import actions
from planner.facts.validation import SpecError

MakeHost = Callable[..., Host]


def make_spec(
    max_bytes: int, primitives: Any = "all", ranks: int = 4, device: str = "cpu", **resources: Any
) -> dict[str, Any]:
    asked = {"primitives": primitives, "min_bytes": max_bytes, "max_bytes": max_bytes}
    return {
        "kind": "lab",
        "name": "lab",
        "layout": {"dp": ranks},
        "lab": asked,
        "resources": {"device": device, **resources},
    }


def get_rejection(owner: User, spec: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as error:
        actions.submit(owner, spec)
    (problem,) = error.value.problems
    assert problem.field == "lab.max_bytes"
    return problem.message


def test_ranks_share_the_memory_of_a_host(owner: User, make_host: MakeHost) -> None:
    """The host has 4 slots of 1 GiB each."""
    make_host()
    told = get_rejection(owner, make_spec(2**29))
    assert told == (
        "The benchmark needs 8.0 GiB (4 ranks x 4 full buffers of all_to_all x 536,870,912 B), "
        "but host-a has 4.0 GiB. Use a smaller `lab.max_bytes`."
    )
    actions.submit(owner, make_spec(2**28))
    actions.submit(owner, make_spec(2**29, ["all_gather"]))
    actions.submit(owner, make_spec(2**31, ["scatter"]))
    assert "1 rank x 2 full buffers of gather x 4,294,967,296 B" in get_rejection(owner, make_spec(2**32, ["gather"]))


def test_gpu_holds_the_buffers_of_its_rank(owner: User, make_host: MakeHost) -> None:
    make_host()
    Host.objects.update(device="cuda", memory_bytes=2**34)
    actions.submit(owner, make_spec(2**32, device="cuda"))
    Host.objects.update(memory_bytes=2**33)
    assert get_rejection(owner, make_spec(2**32, ["all_to_all"], device="cuda")) == (
        "The benchmark needs 16.0 GiB (4 full buffers of all_to_all x 4,294,967,296 B), "
        "but a GPU of host-a has 8.0 GiB. Use a smaller `lab.max_bytes`."
    )


def test_any_host_or_the_named_host_must_have_the_memory(owner: User, make_host: MakeHost) -> None:
    make_host()
    make_host("large", slots=32)
    make_host("wide-enough-for-none", slots=2)
    actions.submit(owner, make_spec(2**30))
    assert "but host-a has" in get_rejection(owner, make_spec(2**30, host="host-a"))
    Host.objects.filter(name="large").update(memory_bytes=0)
    actions.submit(owner, make_spec(2**32))  # The memory of this host is unknown.
