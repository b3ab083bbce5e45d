"""Whatever a host signs as its own word, the controller continues and an innocent job between it all runs to its end.

FUZZ=N tries N times as many cases.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from contracts.names import events_stream
from contracts.security import build_signed_entry
from jobs.core.credentials import derive_signing_keys
from jobs.models import Attempt, Cursor, DeadLetter, Job, SlotAllocation, Status, get_cursor_name
from jobs.queue import actions
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.scheduler import schedule
from tests.contracts.test_codec import SUMMARY
from tests.jobs.conftest import attempt_event, host_event, report, say
from tests.planner.wrong_specs import GOOD

TIMES = int(os.environ.get("FUZZ", "1"))
BODIES = 24  # an example
VICTIM = "victim"  # stands for the job's id, which each example has anew
OTHER = "host-b"

DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
WRONG: list[Any] = [
    *(float("nan"), float("inf"), 1e308, -1, -(2**63), 2**63, 2**64 - 1, 2**31, 0.5, True, None),
    *("", "text", "a\0b", "\0", "x" * 300, "x" * 5000, "host\x1b[31m", "٢", "💥" * 200, b"\xff\0", b""),
    *([], {}, [[]], {"a": float("nan")}, {"\0": 1}, {"a": "b\0"}, {"a": 2**63}, {1: 2}, DEEP),
]


def valid() -> list[dict[str, Any]]:
    ended = report(VICTIM, 1, "exited", "failed")
    ended["exit"]["summary"] = SUMMARY | {"profile": {"version": 2}, "lab": {"a": [1]}}
    running = report(VICTIM, 1, "running", note="rank 1 is stopped")
    return [
        host_event(OTHER, attempts=[running, ended]),
        host_event(OTHER, attempts=[ended] * 3),
        {**attempt_event(VICTIM, 1, "exited", "succeeded", OTHER), "report": ended},
        attempt_event(VICTIM, 1, "running", host=OTHER),
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a message."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [] if not path else [path]
    for key, item in inside:
        found += places(item, (*path, key))
    return found


MUTABLE = [(event, place) for event in valid() for place in places(event)]


def mutated(chosen: tuple[dict[str, Any], tuple[Any, ...]], wrong: Any) -> Any:
    event, path = copy.deepcopy(chosen)
    inner: Any = event
    for key in path[:-1]:
        inner = inner[key]
    if wrong == "delete":
        del inner[path[-1]]
    else:
        inner[path[-1]] = wrong
    return event


def packed(value: Any) -> bytes:
    body: bytes = msgpack.packb(value, use_bin_type=True)
    return body


plain = st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
anything = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(plain, inner), max_leaves=12)
bodies = st.one_of(
    st.builds(mutated, st.sampled_from(MUTABLE), st.sampled_from([*WRONG, "delete"])).map(packed),
    st.sampled_from(valid()).map(packed),
    anything.map(packed),
    st.binary(max_size=200),
)


@pytest.mark.usefixtures("each_database")
def test_an_innocent_job_runs_whatever_is_said_around_it(live_redis: redis.Redis, each_database: str) -> None:
    owner = User.objects.create_user("owner")
    say(live_redis, host_event("host-a"))
    say(live_redis, host_event(OTHER))
    read_events(live_redis)
    key, tried = bytes.fromhex(derive_signing_keys(OTHER, 1)[0]), 0

    def put(told: list[bytes], victim: Job) -> None:
        with live_redis.pipeline(transaction=False) as pipe:
            for body in told:
                # Same length: what was packed stays well formed.
                pipe.xadd(
                    events_stream(OTHER), build_signed_entry(key, body.replace(packed(VICTIM), packed(victim.id)))
                )
            pipe.execute()

    @settings(
        max_examples=20 * TIMES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking takes minutes, with a database in the loop
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bodies, min_size=BODIES, max_size=BODIES))
    def run(told: list[bytes]) -> None:
        nonlocal tried
        say(live_redis, host_event("host-a"))
        read_events(live_redis)
        made = [actions.submit(owner, {**GOOD, "resources": {"host": host}})[0] for host in ("host-a", OTHER)]
        innocent, victim = made
        schedule()
        third = BODIES // 3
        put(told[:third], victim)
        say(live_redis, attempt_event(innocent.id, 1, "running"))
        put(told[third : 2 * third], victim)
        say(live_redis, attempt_event(innocent.id, 1, "exited", "succeeded"))
        put(told[2 * third :], victim)
        read_events(live_redis)
        innocent.refresh_from_db()
        assert innocent.status == Status.SUCCEEDED
        last: Any = live_redis.xinfo_stream(events_stream(OTHER))
        assert Cursor.objects.get(name=get_cursor_name(OTHER)).position == last["last-generated-id"].decode()
        assert not SlotAllocation.objects.exclude(member__attempt__job=victim).exists()
        tried += len(told)
        Job.objects.all().delete()

    run()
    assert tried >= 450 * TIMES
    assert DeadLetter.objects.exists()
    assert Attempt.objects.count() == 0
