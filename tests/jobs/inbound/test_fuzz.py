"""Random signed events of one host do not affect the controller or jobs of other hosts.

FUZZ=N runs N times the default number of cases.
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
from tests.jobs.conftest import attempt_event, host_event, report, send_event
from tests.planner.wrong_specs import GOOD

TIMES = int(os.environ.get("FUZZ", "1"))
BODIES = 24  # per example
VICTIM = "victim"  # Placeholder for the id of the job, which differs per example.
OTHER = "host-b"

DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
WRONG: list[Any] = [
    *(float("nan"), float("inf"), 1e308, -1, -(2**63), 2**63, 2**64 - 1, 2**31, 0.5, True, None),
    *("", "text", "a\0b", "\0", "x" * 300, "x" * 5000, "host\x1b[31m", "٢", "💥" * 200, b"\xff\0", b""),
    *([], {}, [[]], {"a": float("nan")}, {"\0": 1}, {"a": "b\0"}, {"a": 2**63}, {1: 2}, DEEP),
]


def make_valid_events() -> list[dict[str, Any]]:
    ended = report(VICTIM, 1, "exited", "failed")
    ended["exit"]["summary"] = SUMMARY | {"profile": {"version": 2}, "lab": {"a": [1]}}
    running = report(VICTIM, 1, "running", note="rank 1 is stopped")
    return [
        host_event(OTHER, attempts=[running, ended]),
        host_event(OTHER, attempts=[ended] * 3),
        {**attempt_event(VICTIM, 1, "exited", "succeeded", OTHER), "report": ended},
        attempt_event(VICTIM, 1, "running", host=OTHER),
    ]


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a message."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [] if not path else [path]
    for key, item in inside:
        found += list_paths(item, (*path, key))
    return found


MUTABLE = [(event, place) for event in make_valid_events() for place in list_paths(event)]


def mutate(choice: tuple[dict[str, Any], tuple[Any, ...]], wrong: Any) -> Any:
    event, path = copy.deepcopy(choice)
    inner: Any = event
    for key in path[:-1]:
        inner = inner[key]
    if wrong == "delete":
        del inner[path[-1]]
    else:
        inner[path[-1]] = wrong
    return event


def pack(value: Any) -> bytes:
    body: bytes = msgpack.packb(value, use_bin_type=True)
    return body


plain = st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
anything = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(plain, inner), max_leaves=12)
bodies = st.one_of(
    st.builds(mutate, st.sampled_from(MUTABLE), st.sampled_from([*WRONG, "delete"])).map(pack),
    st.sampled_from(make_valid_events()).map(pack),
    anything.map(pack),
    st.binary(max_size=200),
)


@pytest.mark.usefixtures("each_database")
def test_random_events_do_not_affect_another_job(live_redis: redis.Redis, each_database: str) -> None:
    owner = User.objects.create_user("owner")
    send_event(live_redis, host_event("host-a"))
    send_event(live_redis, host_event(OTHER))
    read_events(live_redis)
    key, num_tried = bytes.fromhex(derive_signing_keys(OTHER, 1)[0]), 0

    def send_bodies(messages: list[bytes], victim: Job) -> None:
        with live_redis.pipeline(transaction=False) as pipe:
            for body in messages:
                # Both have the same length, so the message stays well formed.
                pipe.xadd(events_stream(OTHER), build_signed_entry(key, body.replace(pack(VICTIM), pack(victim.id))))
            pipe.execute()

    @settings(
        max_examples=20 * TIMES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # Shrinking takes minutes, because each case uses a database.
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bodies, min_size=BODIES, max_size=BODIES))
    def run(messages: list[bytes]) -> None:
        nonlocal num_tried
        send_event(live_redis, host_event("host-a"))
        read_events(live_redis)
        both = [actions.submit(owner, {**GOOD, "resources": {"host": host}})[0] for host in ("host-a", OTHER)]
        innocent, victim = both
        schedule()
        third = BODIES // 3
        send_bodies(messages[:third], victim)
        send_event(live_redis, attempt_event(innocent.id, 1, "running"))
        send_bodies(messages[third : 2 * third], victim)
        send_event(live_redis, attempt_event(innocent.id, 1, "exited", "succeeded"))
        send_bodies(messages[2 * third :], victim)
        read_events(live_redis)
        innocent.refresh_from_db()
        assert innocent.status == Status.SUCCEEDED
        last: Any = live_redis.xinfo_stream(events_stream(OTHER))
        assert Cursor.objects.get(name=get_cursor_name(OTHER)).position == last["last-generated-id"].decode()
        assert not SlotAllocation.objects.exclude(member__attempt__job=victim).exists()
        num_tried += len(messages)
        Job.objects.all().delete()

    run()
    assert num_tried >= 450 * TIMES
    assert DeadLetter.objects.exists()
    assert Attempt.objects.count() == 0
