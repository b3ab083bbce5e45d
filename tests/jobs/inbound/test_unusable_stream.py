"""Event streams that cannot be read are set aside, and hosts can send again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from contracts.names import events_stream
from jobs.models import Cursor, DeadLetter, Host
from jobs.queue.inbound.streams import UNUSABLE_STREAM_S, read_events, wait_for_event
from tests.jobs.conftest import host_event, send_event, sign_event

EVENTS = events_stream("host-a")
SET_ASIDE = f"{EVENTS}:unusable"
LAST = f"{2**64 - 1}-{2**64 - 1}"

pytestmark = pytest.mark.django_db


def put_last(client: redis.Redis) -> None:
    client.xadd(EVENTS, {"b": "x"}, id=LAST)


def put_and_delete_last(client: redis.Redis) -> None:
    put_last(client)
    client.xdel(EVENTS, LAST)


def put_far(client: redis.Redis) -> None:
    client.xadd(EVENTS, {"b": "x"}, id=f"{2**53}-0")


def put_text(client: redis.Redis) -> None:
    client.set(EVENTS, "x")


@pytest.mark.parametrize("damage", [put_last, put_and_delete_last, put_far, put_text])
def test_an_unusable_stream_is_set_aside(live_redis: redis.Redis, damage: Callable[[redis.Redis], None]) -> None:
    live_redis.set(SET_ASIDE, "an older one")
    send_event(live_redis, host_event(slots=2))
    read_events(live_redis)
    damage(live_redis)
    wait_for_event(live_redis, 0.01)
    read_events(live_redis)
    assert not live_redis.exists(EVENTS)
    assert live_redis.get(SET_ASIDE) == b"x" if damage is put_text else live_redis.type(SET_ASIDE) == b"stream"
    assert UNUSABLE_STREAM_S - 60 < live_redis.ttl(SET_ASIDE) <= UNUSABLE_STREAM_S
    reasons = [letter.reason for letter in DeadLetter.objects.all() if SET_ASIDE in letter.reason]
    assert len(reasons) == 1
    assert Cursor.objects.get(name="events:host-a").position == "0-0"
    wait_for_event(live_redis, 0.01)
    send_event(live_redis, host_event(slots=3))
    assert read_events(live_redis) == 1
    assert Host.objects.get().slots == 3
    assert read_events(live_redis) == 0


def test_reads_events_before_the_damage(live_redis: redis.Redis) -> None:
    send_event(live_redis, host_event(slots=2))
    put_last(live_redis)
    assert read_events(live_redis) == 2
    assert Host.objects.get().slots == 2


def test_cursor_at_the_last_id_is_reset(live_redis: redis.Redis) -> None:
    sign_event(host_event())  # Creates the host.
    put_last(live_redis)
    Cursor.objects.create(name="events:host-a", position=LAST)
    read_events(live_redis)
    send_event(live_redis, host_event(slots=3))
    assert read_events(live_redis) == 1
