"""Check the rights of hosts in Redis with their own credentials on a live server."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone
from kombu import Connection, Consumer, Exchange, Queue

from contracts.names import (
    LEGACY_EVENTS_STREAM,
    TASK_ACKNOWLEDGE,
    cancel_key,
    events_stream,
    gang_key,
    host_key_prefix,
    host_queue,
    loan_key,
    requested_timelines_key,
    telemetry_stream,
)
from jobs.models import DeadLetter, Host, Loan, Member, Outbox
from jobs.queue import staff_actions as staff
from jobs.queue.hosts.redis_access import RIGHTS_AFTER_END, RedisUsers, get_redis_user
from jobs.queue.inbound import streams
from jobs.queue.inbound import streams as events
from jobs.queue.inbound.streams import MAX_WAITING_EVENTS, read_events
from jobs.queue.orders import deliver
from tests.jobs.conftest import host_event
from tests.jobs.hosts.joined_hosts import Guest, admitted, running_job, worker
from tests.jobs.hosts.test_join import IDENTITIES
from tests.support.processes import RedisServer, wait_until
from workers.host.celery_transport import get_key_options


@pytest.fixture
def guests(live_redis: redis.Redis, db: None) -> Iterator[tuple[Guest, Guest]]:
    a, b = admitted("host-a"), admitted("host-b", IDENTITIES[1])
    yield a, b
    for guest in (a, b):
        guest.redis.close()


def test_host_can_send_only_its_own_events(guests: tuple[Guest, Guest], live_redis: redis.Redis) -> None:
    _, b = guests
    stream = events_stream("host-b")
    b.redis.xadd(stream, b.signed(host_event("host-b", slots=7)))
    b.redis.xadd(stream, b.signed(host_event("host-a", slots=64)))
    b.redis.xadd(stream, {**b.signed(host_event("host-b", slots=66)), "b": msgpack.packb(host_event("host-b"))})
    assert read_events(live_redis) == 3
    assert dict(Host.objects.values_list("name", "slots")) == {"host-a": 4, "host-b": 7}
    reasons = DeadLetter.objects.order_by("id").values_list("reason", flat=True)
    assert list(reasons) == [
        "the message names host host-a, but host host-b sent it",
        "The message of host host-b has an invalid signature.",
    ]


def test_signature_identifies_senders_on_the_shared_stream(
    guests: tuple[Guest, Guest], live_redis: redis.Redis
) -> None:
    a, b = guests
    RedisUsers().sync(live_redis)
    b.redis.xadd(LEGACY_EVENTS_STREAM, b.signed(host_event("host-b", slots=7)))
    b.redis.xadd(LEGACY_EVENTS_STREAM, b.signed(host_event("host-a", slots=64)))
    b.redis.xadd(LEGACY_EVENTS_STREAM, {"b": msgpack.packb(host_event("host-a", slots=65))})
    b.redis.xadd(LEGACY_EVENTS_STREAM, b.signed(host_event("nobody")))
    a.redis.xadd(LEGACY_EVENTS_STREAM, a.signed(host_event("host-a", slots=6)))
    assert read_events(live_redis) == 5
    assert dict(Host.objects.values_list("name", "slots")) == {"host-a": 6, "host-b": 7}
    assert list(DeadLetter.objects.order_by("id").values_list("reason", flat=True)) == [
        "The message of host host-a has an invalid signature.",
        "The message of host host-a has an invalid signature.",
        "Host nobody has not joined.",
    ]


def test_host_with_own_stream_cannot_use_the_shared_one(guests: tuple[Guest, Guest], live_redis: redis.Redis) -> None:
    a, b = guests
    access = RedisUsers()
    access.sync(live_redis)
    b.redis.xadd(events_stream("host-b"), b.signed(host_event("host-b")))
    read_events(live_redis)
    access.sync(live_redis)
    a.redis.xadd(LEGACY_EVENTS_STREAM, a.signed(host_event("host-a")))
    with pytest.raises(redis.exceptions.NoPermissionError):
        b.redis.xadd(LEGACY_EVENTS_STREAM, b.signed(host_event("host-b")))


def test_flooding_host_does_not_affect_others(guests: tuple[Guest, Guest], live_redis: redis.Redis) -> None:
    a, b = guests
    with b.redis.pipeline(transaction=False) as pipe:
        for _ in range(100_000):
            pipe.xadd(events_stream("host-b"), {"b": "junk"})
        pipe.execute()
    for slots in (5, 6):  # however long the flood lasts
        a.redis.xadd(events_stream("host-a"), a.signed(host_event("host-a", slots=slots)))
        began = time.monotonic()
        assert read_events(live_redis) < 50_000
        assert Host.objects.get(name="host-a").slots == slots
        assert time.monotonic() - began < 5, "half a second and a chunk, on a busy machine"
    assert live_redis.xlen(events_stream("host-b")) <= MAX_WAITING_EVENTS
    assert set(DeadLetter.objects.values_list("sender", flat=True)) == {"host-b"}
    with pytest.raises(redis.exceptions.NoPermissionError):
        b.redis.xadd(events_stream("host-a"), {"b": "x"}, maxlen=1)


def test_limits_pending_bytes_per_host(
    guests: tuple[Guest, Guest], live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = guests
    monkeypatch.setattr(streams, "MAX_WAITING_BYTES", 2**20)
    monkeypatch.setattr(events, "READ_S", 0.0)
    for _ in range(100):
        b.redis.xadd(events_stream("host-b"), {"b": b"\0" * 2**16})
    assert read_events(live_redis) == streams.EVENTS_PER_READ
    assert live_redis.memory_usage(events_stream("host-b")) <= 2**20
    letter = DeadLetter.objects.filter(reason__contains="bytes were waiting").get()
    assert letter.sender == "host-b"
    assert 0 < read_events(live_redis) < 68 - streams.EVENTS_PER_READ
    assert read_events(live_redis) == 0


def test_host_cannot_read_foreign_orders_or_events(guests: tuple[Guest, Guest], live_redis: redis.Redis) -> None:
    a, b = guests
    live_redis.lpush(host_queue("host-a"), "an order")
    live_redis.xadd(events_stream("host-a"), {"b": "x"})
    refused: list[Callable[[redis.Redis], object]] = [
        lambda r: r.lrange(host_queue("host-a"), 0, -1),
        lambda r: r.brpop([host_queue("host-a")], timeout=1),
        lambda r: r.lpush(host_queue("host-a"), "forged"),
        lambda r: r.xadd(events_stream("host-a"), {"b": "x"}),
        lambda r: r.xrange(events_stream("host-a")),
        lambda r: r.xread({events_stream("host-a"): "0"}),
        lambda r: r.xtrim(events_stream("host-a"), maxlen=0),
        lambda r: r.delete(events_stream("host-a")),
        lambda r: r.memory_usage(events_stream("host-a")),
        lambda r: r.xread({LEGACY_EVENTS_STREAM: "0"}),
        lambda r: r.xtrim(LEGACY_EVENTS_STREAM, maxlen=0),
        lambda r: r.delete(LEGACY_EVENTS_STREAM),
        lambda r: r.set(cancel_key("somejob", 1), "1"),
        lambda r: r.delete(cancel_key("somejob", 1)),
    ]
    for command in refused:
        with pytest.raises(redis.exceptions.NoPermissionError):
            command(b.redis)
    assert b.redis.exists(cancel_key("somejob", 1)) == 0
    assert a.redis.brpop([host_queue("host-a")], timeout=1) == (host_queue("host-a").encode(), b"an order")


FORBIDDEN = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "GET", "requirepass"),
    ("CONFIG", "SET", "requirepass", "x"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "default", "nopass"),
    ("EVAL", "return 1", "0"),
    ("SCRIPT", "LOAD", "return 1"),
    ("FUNCTION", "LIST"),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("SHUTDOWN",),
    ("REPLICAOF", "192.0.2.1", "6379"),
    ("MIGRATE", "192.0.2.1", "6379", "k", "0", "1"),
    ("RESTORE", "k", "0", "x"),
    ("SWAPDB", "0", "1"),
    ("PUBLISH", "c", "m"),
    ("SUBSCRIBE", "c"),
    ("SAVE",),
]


def test_host_has_no_admin_commands(guests: tuple[Guest, Guest]) -> None:
    client = guests[1].redis
    taken = []
    for words in FORBIDDEN:
        try:
            client.execute_command(*words)
        except redis.exceptions.NoPermissionError:
            continue
        taken.append(words)
    assert taken == []


def test_host_writes_only_to_streams_of_its_runs(
    guests: tuple[Guest, Guest], owner: User, live_redis: redis.Redis
) -> None:
    a, b = guests
    job = running_job(owner, "host-a")
    stream = telemetry_stream(job, 1)
    access = RedisUsers()
    access.sync(live_redis)
    assert a.redis.xadd(stream, {"b": "x"})
    assert a.redis.expire(stream, 60)
    for command in (
        lambda: b.redis.xadd(stream, {"b": "forged"}),
        lambda: a.redis.xadd(telemetry_stream(job, 2), {"b": "of a later attempt"}),
        lambda: a.redis.xadd(telemetry_stream(job, 1, 1), {"b": "of another member"}),
        lambda: a.redis.hset(gang_key(job, 1), "0", "no gang"),
        lambda: a.redis.xrange(stream),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            command()
    assert live_redis.xlen(stream) == 1
    live_redis.sadd(requested_timelines_key(job, 1), 7)
    assert a.redis.smembers(requested_timelines_key(job, 1)) == {b"7"}
    for command in (
        lambda: b.redis.smembers(requested_timelines_key(job, 1)),
        lambda: a.redis.smembers(requested_timelines_key(job, 2)),
        lambda: a.redis.sadd(requested_timelines_key(job, 1), 8),
        lambda: a.redis.delete(requested_timelines_key(job, 1)),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            command()
    assert access.sync(live_redis) == 0, "nothing is told twice"
    Member.objects.update(ended=timezone.now())
    access.sync(live_redis)
    assert a.redis.xadd(stream, {"b": "the rest"}), "a supervisor has some time to say it"
    Member.objects.update(ended=timezone.now() - RIGHTS_AFTER_END)
    access.sync(live_redis)
    with pytest.raises(redis.exceptions.NoPermissionError):
        a.redis.xadd(stream, {"b": "too late"})


def test_only_members_of_a_gang_can_meet(guests: tuple[Guest, Guest], owner: User, live_redis: redis.Redis) -> None:
    a, b = guests
    job = running_job(owner, "host-a")
    lead = Member.objects.get()
    host = Host.objects.get(name="host-b")
    Member.objects.create(
        attempt=lead.attempt,
        node=1,
        host=host,
        host_name=host.name,
        first_rank=1,
        num_ranks=1,
        ordered=timezone.now(),
    )
    stranger = admitted("host-c", IDENTITIES[2])
    Loan.objects.create(attempt=lead.attempt, host=Host.objects.get(name="host-c"))
    RedisUsers().sync(live_redis)
    for node, guest in enumerate((a, b)):
        guest.redis.hset(gang_key(job, 1), str(node), json.dumps(["10.0.0.1", 1234]))
        assert guest.redis.xadd(telemetry_stream(job, 1, node), {"b": "x"})
    assert len(a.redis.hgetall(gang_key(job, 1))) == 2
    with pytest.raises(redis.exceptions.NoPermissionError):
        stranger.redis.hgetall(gang_key(job, 1))
    where = loan_key("host-c", job, 1)
    stranger.redis.hset(where, mapping={"address": "10.0.0.3", "port": 1234})
    assert a.redis.hgetall(where)[b"port"] == b"1234", "it lends to the lead"
    for refused in (lambda: a.redis.hset(where, "port", 1), lambda: b.redis.hgetall(where)):
        with pytest.raises(redis.exceptions.NoPermissionError):
            refused()
    with pytest.raises(redis.exceptions.NoPermissionError):
        b.redis.xadd(telemetry_stream(job, 1), {"b": "of the lead"})
    stranger.redis.close()


def test_removed_host_is_disconnected(guests: tuple[Guest, Guest], owner: User, live_redis: redis.Redis) -> None:
    _, b = guests
    running_job(owner, "host-a")
    with pytest.raises(staff.BusyHostError, match="host-a still has an unfinished attempt"):
        staff.remove_host(Host.objects.get(name="host-a"), "staff")
    late = b.signed(host_event("host-b", slots=99))
    b.redis.xadd(events_stream("host-b"), {"b": "not heard yet"})
    assert b.redis.ping()
    staff.remove_host(Host.objects.get(name="host-b"), "staff")
    with pytest.raises((redis.AuthenticationError, redis.ConnectionError)):
        b.redis.ping()
    assert not live_redis.exists(events_stream("host-b"))
    live_redis.xadd(LEGACY_EVENTS_STREAM, late)
    read_events(live_redis)
    assert DeadLetter.objects.get().reason == "Host host-b was removed."
    assert Host.objects.get(name="host-b").slots == 4


def test_controller_restores_changed_redis_users(guests: tuple[Guest, Guest], live_redis: redis.Redis) -> None:
    access = RedisUsers()
    access.sync(live_redis)
    live_redis.execute_command("ACL DELUSER", get_redis_user("host-a"))
    live_redis.execute_command("ACL SETUSER", get_redis_user("an-old-one"), "on", "nopass", "+@all", "~*")
    Host.objects.filter(name="host-b").update(removed=timezone.now())  # while Redis was away
    access.sync(live_redis)
    names: Any = live_redis.acl_users()
    assert {name for name in names if name.startswith("meshboard")} == {get_redis_user("host-a")}


def test_host_returns_unfinished_orders_with_its_rights(guests: tuple[Guest, Guest], live_redis: redis.Redis) -> None:
    a, _ = guests
    Outbox.objects.create(task=TASK_ACKNOWLEDGE, queue=host_queue("host-a"), arguments=["somejob", 1])
    deliver(live_redis)
    options = {**get_key_options(host_key_prefix("host-a")), "visibility_timeout": -1}
    taken: list[Any] = []
    with Connection(
        a.joined["redis_url"], transport="workers.host.celery_transport:Transport", transport_options=options
    ) as line:
        channel = line.channel()
        queue = Queue(host_queue("host-a"), Exchange(host_queue("host-a")), channel=channel)
        with Consumer(channel, [queue], callbacks=[lambda _body, message: taken.append(message)]):
            line.drain_events(timeout=10)
            assert (len(taken), live_redis.llen(host_queue("host-a"))) == (1, 0)
            channel.qos.restore_visible(interval=1)  # type: ignore[attr-defined]
            line.drain_events(timeout=10)
        assert [message.headers["task"] for message in taken] == [TASK_ACKNOWLEDGE] * 2
        taken[1].ack()
    assert {key.decode() for key in live_redis.keys("*unacked*")} <= {f"{host_key_prefix('host-a')}unacked_index"}
    own = {key for key in live_redis.keys("*") if not key.startswith(host_key_prefix("host-a").encode())}
    assert own <= {
        b"_kombu.binding." + host_queue("host-a").encode(),
        b"_kombu.binding_permanent." + host_queue("host-a").encode(),
    }


def test_controller_updates_old_redis_users(
    guests: tuple[Guest, Guest], redis_service: RedisServer, live_redis: redis.Redis
) -> None:
    """Load the users of an older file, as a Redis with an aclfile does at its start."""
    access = RedisUsers()
    access.sync(live_redis)
    redis_service.stop(signal.SIGKILL)
    redis_service.start()
    live_redis.execute_command("ACL SETUSER", get_redis_user("host-a"), "on", "nopass", "+@all", "~*")
    live_redis.execute_command("ACL SETUSER", get_redis_user("host-b"), "on", "nopass")
    access.sync(live_redis)
    for guest in guests:
        assert guest.redis.llen(host_queue(guest.name)) == 0
        with pytest.raises(redis.exceptions.NoPermissionError):
            guest.redis.flushall()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("away_s", [0, pytest.param(45, marks=pytest.mark.slow)])
def test_host_reconnects_to_an_emptied_redis(
    redis_service: RedisServer, live_redis: redis.Redis, tmp_path: Path, away_s: int
) -> None:
    """The next pass of the controller restores the Redis user of the host."""
    guest, access = admitted("host-a"), RedisUsers()

    def has_contact() -> bool:
        """Run the controller's synchronization, and return whether the host has sent an event since the last call."""
        access.sync(live_redis)
        before = Host.objects.get().sequence
        read_events(live_redis)
        return Host.objects.get().sequence > before

    def taken() -> bool:
        access.sync(live_redis)
        return live_redis.llen(host_queue("host-a")) == 0

    with worker(guest, tmp_path):
        wait_until(has_contact, "the host announces itself")
        redis_service.stop(signal.SIGKILL)
        for left in tmp_path.glob("redis/*.rdb"):
            left.unlink()
        time.sleep(away_s)
        redis_service.start()
        back = time.monotonic()
        assert live_redis.acl_users() == ["default"]
        wait_until(has_contact, "the host has contact again", 10)
        Outbox.objects.create(task=TASK_ACKNOWLEDGE, queue=host_queue("host-a"), arguments=["somejob", 1])
        deliver(live_redis)
        wait_until(taken, "the host takes orders again", 10 - (time.monotonic() - back))
    text = (tmp_path / "worker.log").read_text()
    assert "NOPERM" not in text
    assert "no permissions" not in text.lower()
    shutil.rmtree(tmp_path / "state")
