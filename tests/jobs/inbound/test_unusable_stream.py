"""Whatever is put where the events stream belongs, hosts are heard again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from contracts.names import events_stream
from jobs.models import Cursor, DeadLetter, Host
from jobs.queue.inbound.streams import UNUSABLE_STREAM_S, read_events, wait_for_event
from tests.jobs.conftest import host_event, say, signed

EVENTS = events_stream("host-a")
SET_ASIDE = f"{EVENTS}:unusable"
LAST = f"{2**64 - 1}-{2**64 - 1}"

pytestmark = pytest.mark.django_db


def put_last(client: redis.Redis) -> None:
    client.xadd(EVENTS, {"b": "x"}, id=LAST)


def put_last_and_take_it_away(client: redis.Redis) -> None:
    put_last(client)
    client.xdel(EVENTS, LAST)


def put_far(client: redis.Redis) -> None:
    client.xadd(EVENTS, {"b": "x"}, id=f"{2**53}-0")


def put_text(client: redis.Redis) -> None:
    client.set(EVENTS, "x")


@pytest.mark.parametrize("spoil", [put_last, put_last_and_take_it_away, put_far, put_text])
def test_an_unusable_stream_is_set_aside(live_redis: redis.Redis, spoil: Callable[[redis.Redis], None]) -> None:
    live_redis.set(SET_ASIDE, "an older one")
    say(live_redis, host_event(slots=2))
    read_events(live_redis)
    spoil(live_redis)
    wait_for_event(live_redis, 0.01)
    read_events(live_redis)
    assert not live_redis.exists(EVENTS)
    assert live_redis.get(SET_ASIDE) == b"x" if spoil is put_text else live_redis.type(SET_ASIDE) == b"stream"
    assert UNUSABLE_STREAM_S - 60 < live_redis.ttl(SET_ASIDE) <= UNUSABLE_STREAM_S
    told = [letter.reason for letter in DeadLetter.objects.all() if SET_ASIDE in letter.reason]
    assert len(told) == 1
    assert Cursor.objects.get(name="events:host-a").position == "0-0"
    wait_for_event(live_redis, 0.01)
    say(live_redis, host_event(slots=3))
    assert read_events(live_redis) == 1
    assert Host.objects.get().slots == 3
    assert read_events(live_redis) == 0


def test_what_was_said_before_the_stream_was_spoilt_is_heard(live_redis: redis.Redis) -> None:
    say(live_redis, host_event(slots=2))
    put_last(live_redis)
    assert read_events(live_redis) == 2
    assert Host.objects.get().slots == 2


def test_a_cursor_that_already_stands_at_the_last_id_is_no_trap(live_redis: redis.Redis) -> None:
    signed(host_event())  # it has joined
    put_last(live_redis)
    Cursor.objects.create(name="events:host-a", position=LAST)
    read_events(live_redis)
    say(live_redis, host_event(slots=3))
    assert read_events(live_redis) == 1
