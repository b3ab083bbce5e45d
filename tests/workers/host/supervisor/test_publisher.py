"""Telemetry in Redis: limited bytes, each batch once, and an expiry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.connection import AbstractConnection

from contracts.codec import MAX_BATCH_BYTES, decode_batch
from contracts.control import AttemptReport
from contracts.names import requested_timelines_key, telemetry_stream
from contracts.telemetry.batches import Item
from contracts.telemetry.items import CheckpointItem, LogItem, PhaseItem
from jobs.runs.history.recording.attempt_recorder import StreamKey, read_new_entries
from tests.support.processes import RedisServer
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings
from workers.host.supervisor.publisher import BoardTransport, Publisher, TokenBucket
from workers.host.supervisor.redis_transport import STREAM_EXPIRES_S, RedisTransport
from workers.host.supervisor.telemetry_buffer import MAX_LATE_LOG_BYTES, TelemetryBuffer
from workers.host.supervisor.telemetry_session import cancel_tasks

STREAM = telemetry_stream("job", 1)
STREAM_BYTES = 2**20


def run(
    server: RedisServer, work: Callable[[Publisher, TelemetryBuffer, BoardTransport], Awaitable[None]]
) -> list[bytes]:
    """Run some work with a publisher, and return the content of the stream."""
    path = Path("/nowhere")
    settings = HostSettings(
        server.url, "testhost", 4, "cpu", path, path, path, path, "workers.trainer", stream_bytes=STREAM_BYTES
    )

    async def main() -> None:
        board = TelemetryBuffer()
        line = RedisTransport(AttemptDir(path, "job", 1), settings)
        await work(Publisher("job", 1, board, line), board, line)
        await line.close()

    asyncio.run(main())
    entries: Any = server.client().xrange(STREAM)
    return [fields[b"b"] for _, fields in entries]


def problem(number: int) -> CheckpointItem:
    return CheckpointItem(
        kind="checkpoint",
        rank=0,
        time=0.0,
        step=number,
        name=None,
        num_bytes=0,
        stall_s=0.0,
        save_s=0.0,
        problem="x" * 1000,
    )


def items(bodies: list[bytes]) -> list[Item]:
    return [item for body in bodies for item in decode_batch(body)["items"]]


def test_stream_keeps_the_newest_bytes_and_expires(redis_service: RedisServer) -> None:
    async def flood(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        for number in range(4000):
            board.add(problem(number))
        assert await publisher.send()

    bodies = run(redis_service, flood)
    assert max(map(len, bodies)) <= MAX_BATCH_BYTES
    assert STREAM_BYTES - MAX_BATCH_BYTES <= sum(map(len, bodies)) <= STREAM_BYTES
    steps = [item["step"] for item in items(bodies) if item["kind"] == "checkpoint"]
    assert steps == list(range(steps[0], 4000))
    assert STREAM_EXPIRES_S - 60 < redis_service.client().ttl(STREAM) <= STREAM_EXPIRES_S


def test_stream_created_after_the_first_report_expires(redis_service: RedisServer) -> None:
    """Check a job that ends within a minute."""

    async def short_job(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        starting = AttemptReport(job="job", attempt=1, state="starting", slots=[0])
        await line.send_report(starting)
        board.add(problem(1))
        assert await publisher.send()

    run(redis_service, short_job)
    assert STREAM_EXPIRES_S - 60 < redis_service.client().ttl(STREAM) <= STREAM_EXPIRES_S


def test_stream_created_again_after_a_redis_loss_expires(redis_service: RedisServer) -> None:
    async def flushed(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        board.add(problem(1))
        assert await publisher.send()
        redis_service.client().flushall()
        board.add(problem(2))
        assert await publisher.send()
        await line.renew_stream()

    run(redis_service, flushed)
    assert STREAM_EXPIRES_S - 60 < redis_service.client().ttl(STREAM) <= STREAM_EXPIRES_S


def test_thins_a_flood_of_lines_and_sends_other_items(
    redis_service: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.host.supervisor.publisher.LOG_BURST", 300_000)
    monkeypatch.setattr("workers.host.supervisor.publisher.LOG_BYTES_PER_S", 1000)
    lines = 0

    async def flood(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        nonlocal lines
        for _ in range(50):
            board.add(LogItem(kind="log", rank=0, time=0.0, first=lines, lines=["x" * 100] * 1000))
            board.add(PhaseItem(kind="phase", rank=0, time=0.0, phase="step"))
            lines += 1000
            assert await publisher.send()
        late = board.take(2**40, 2**40)
        assert late is not None
        assert late.log_size <= MAX_LATE_LOG_BYTES, "what is shown next is not long past"

    found = items(run(redis_service, flood))
    sent = [item for item in found if item["kind"] == "log"]
    assert sum(len("".join(item["lines"])) for item in sent) <= 300_000
    assert [item["kind"] for item in found].count("phase") == 50
    assert 0 < sum(len(item["lines"]) + item.get("skipped", 0) for item in sent) <= lines


def test_sends_everything_after_an_outage_of_redis(redis_service: RedisServer) -> None:
    async def outage(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        redis_service.stop()
        for number in range(100):
            board.add(problem(number))
            assert not await publisher.send()
        await asyncio.to_thread(redis_service.start)
        assert await publisher.send()

    steps = [item["step"] for item in items(run(redis_service, outage)) if item["kind"] == "checkpoint"]
    assert steps == list(range(100))


def recorded(server: RedisServer) -> list[int]:
    """Return the recorded steps, with -1 for each missing entry."""
    stream = StreamKey("job", 1, 0)
    position: Any = {stream: {"after": "0-0", "number": None}}
    steps: list[int] = []
    while found := list(read_new_entries(server.client(), position)):
        for _, entries in found:
            for received in entries:
                steps += [-1] * received.missing
                steps += (
                    [item["step"] for item in items([received.batch]) if item["kind"] == "checkpoint"]
                    if received.batch
                    else []
                )
                position = {stream: {"after": received.id, "number": received.number}}
    return steps


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Drop the responses of Redis while the event is set. Redis still executes the commands."""
    is_deaf, receive = threading.Event(), AbstractConnection.read_response

    async def hear_or_not(self: Any, *args: Any, **options: Any) -> Any:
        answer = await receive(self, *args, **options)
        if is_deaf.is_set():
            raise redis.exceptions.TimeoutError("no answer")
        return answer

    monkeypatch.setattr(AbstractConnection, "read_response", hear_or_not)
    return is_deaf


def test_records_a_batch_once_when_its_response_was_lost(redis_service: RedisServer, deaf: threading.Event) -> None:
    """Check that later items do not get the number of the unconfirmed batch."""

    async def unheard(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        for number in range(4):
            board.add(problem(number))
            deaf.set() if number % 2 else deaf.clear()
            assert await publisher.send() != deaf.is_set()
        deaf.clear()
        assert await publisher.send()

    run(redis_service, unheard)
    assert recorded(redis_service) == list(range(4))


def test_records_a_batch_once_when_sending_was_cancelled(redis_service: RedisServer) -> None:
    async def cut_off(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        board.add(problem(0))
        assert await publisher.send()
        board.add(problem(1))
        with redis_service.suspend():
            sending = asyncio.create_task(publisher.send())
            await asyncio.sleep(0)  # the publisher waits for an answer now
            await cancel_tasks([sending])
        board.add(problem(2))
        assert await publisher.send()

    run(redis_service, cut_off)
    assert recorded(redis_service) == [0, 1, 2]


def test_does_not_resend_a_batch_after_a_later_command_fails(
    redis_service: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the number of the batch is used once."""

    async def failing(*_args: Any, **_options: Any) -> None:
        raise redis.exceptions.ConnectionError("away")

    async def hindered(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        assert isinstance(line, RedisTransport)
        for name in ("xtrim", "expire"):
            monkeypatch.setattr(line._redis, name, failing)
        board.add(problem(0))
        await publisher.send()
        board.add(problem(1))
        await publisher.send()

    run(redis_service, hindered)
    assert recorded(redis_service) == [0, 1]


def test_reads_requested_steps_and_ignores_invalid_ones(redis_service: RedisServer) -> None:
    request: list[frozenset[int]] = []

    async def work(publisher: Publisher, board: TelemetryBuffer, line: BoardTransport) -> None:
        request.append(await line.get_requested_steps())
        redis_service.client().sadd(requested_timelines_key("job", 1), 3, 40, "x", -1)
        request.append(await line.get_requested_steps())

    run(redis_service, work)
    assert request == [frozenset(), {3, 40}]


def test_token_bucket_gives_its_burst_then_its_rate() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        bucket = TokenBucket(rate=100, burst=50)
        assert bucket.get_level() == 50
        await bucket.wait_for_credit()
        bucket.spend(100)
        assert bucket.get_level() == 0
        await bucket.wait_for_credit()
        assert loop.time() - began >= 0.49, "from before the bucket was made: a busy machine waits within it"

    asyncio.run(main())
