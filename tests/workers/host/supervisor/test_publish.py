"""What an attempt puts into Redis is bounded in bytes, whatever it prints or sends."""

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
from contracts.telemetry.steps import CheckpointItem, LogItem, PhaseItem
from jobs.runs.history.recording.streams import Stream, new_entries
from tests.support.processes import RedisServer
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings
from workers.host.supervisor import publish
from workers.host.supervisor.board import LATE_LOG_BYTES, Board
from workers.host.supervisor.bucket import Bucket
from workers.host.supervisor.line import Line
from workers.host.supervisor.line.over_redis import STREAM_KEPT_S, RedisLine
from workers.host.supervisor.publish import Publisher
from workers.host.supervisor.tasks import cancelled

STREAM = telemetry_stream("job", 1)
STREAM_BYTES = 2**20


def run(server: RedisServer, work: Callable[[Publisher, Board, Line], Awaitable[None]]) -> list[bytes]:
    """Do the work with a publisher; what the stream then holds."""
    path = Path("/nowhere")
    settings = HostSettings(
        server.url, "testhost", 4, "cpu", path, path, path, path, "workers.trainer", stream_bytes=STREAM_BYTES
    )

    async def main() -> None:
        board = Board()
        line = RedisLine(AttemptDir(path, "job", 1), settings)
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


def test_a_stream_keeps_its_newest_bytes_in_entries_of_bounded_size_and_expires(redis_service: RedisServer) -> None:
    async def flood(publisher: Publisher, board: Board, line: Line) -> None:
        for number in range(4000):
            board.add(problem(number))
        assert await publisher.send()

    bodies = run(redis_service, flood)
    assert max(map(len, bodies)) <= MAX_BATCH_BYTES
    assert STREAM_BYTES - MAX_BATCH_BYTES <= sum(map(len, bodies)) <= STREAM_BYTES
    steps = [item["step"] for item in items(bodies) if item["kind"] == "checkpoint"]
    assert steps == list(range(steps[0], 4000))
    assert STREAM_KEPT_S - 60 < redis_service.client().ttl(STREAM) <= STREAM_KEPT_S


def test_a_stream_that_begins_after_the_first_report_expires(redis_service: RedisServer) -> None:
    """A job that ended within a minute once left a stream without an end."""

    async def short_job(publisher: Publisher, board: Board, line: Line) -> None:
        starting = AttemptReport(job="job", attempt=1, state="starting", slots=[0])
        await line.report(starting)
        board.add(problem(1))
        assert await publisher.send()

    run(redis_service, short_job)
    assert STREAM_KEPT_S - 60 < redis_service.client().ttl(STREAM) <= STREAM_KEPT_S


def test_a_stream_begun_anew_after_redis_lost_it_expires(redis_service: RedisServer) -> None:
    async def flushed(publisher: Publisher, board: Board, line: Line) -> None:
        board.add(problem(1))
        assert await publisher.send()
        redis_service.client().flushall()
        board.add(problem(2))
        assert await publisher.send()
        await line.renew()

    run(redis_service, flushed)
    assert STREAM_KEPT_S - 60 < redis_service.client().ttl(STREAM) <= STREAM_KEPT_S


def test_a_flood_of_lines_is_thinned_to_what_may_be_sent_and_other_items_get_through(
    redis_service: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LOG_BURST", 300_000)
    monkeypatch.setattr(publish, "LOG_BYTES_PER_S", 1000)
    lines = 0

    async def flood(publisher: Publisher, board: Board, line: Line) -> None:
        nonlocal lines
        for _ in range(50):
            board.add(LogItem(kind="log", rank=0, time=0.0, first=lines, lines=["x" * 100] * 1000))
            board.add(PhaseItem(kind="phase", rank=0, time=0.0, phase="step"))
            lines += 1000
            assert await publisher.send()
        late = board.take(2**40, 2**40)
        assert late is not None
        assert late.log_size <= LATE_LOG_BYTES, "what is shown next is not long past"

    found = items(run(redis_service, flood))
    sent = [item for item in found if item["kind"] == "log"]
    assert sum(len("".join(item["lines"])) for item in sent) <= 300_000
    assert [item["kind"] for item in found].count("phase") == 50
    assert 0 < sum(len(item["lines"]) + item.get("skipped", 0) for item in sent) <= lines


def test_what_redis_did_not_take_is_sent_later_and_all_of_it(redis_service: RedisServer) -> None:
    async def outage(publisher: Publisher, board: Board, line: Line) -> None:
        redis_service.stop()
        for number in range(100):
            board.add(problem(number))
            assert not await publisher.send()
        await asyncio.to_thread(redis_service.start)
        assert await publisher.send()

    steps = [item["step"] for item in items(run(redis_service, outage)) if item["kind"] == "checkpoint"]
    assert steps == list(range(100))


def recorded(server: RedisServer) -> list[int]:
    """Steps as the history has them, -1 for each entry that it misses."""
    stream = Stream("job", 1, 0)
    position: Any = {stream: {"after": "0-0", "number": None}}
    steps: list[int] = []
    while found := list(new_entries(server.client(), position)):
        for _, entries in found:
            for heard in entries:
                steps += [-1] * heard.missing
                steps += (
                    [item["step"] for item in items([heard.batch]) if item["kind"] == "checkpoint"]
                    if heard.batch
                    else []
                )
                position = {stream: {"after": heard.id, "number": heard.number}}
    return steps


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, Redis does what it is asked, and no answer arrives."""
    is_deaf, hear = threading.Event(), AbstractConnection.read_response

    async def hear_or_not(self: Any, *args: Any, **options: Any) -> Any:
        answer = await hear(self, *args, **options)
        if is_deaf.is_set():
            raise redis.exceptions.TimeoutError("no answer")
        return answer

    monkeypatch.setattr(AbstractConnection, "read_response", hear_or_not)
    return is_deaf


def test_a_batch_whose_answer_was_lost_is_recorded_once_and_what_comes_behind_it_too(
    redis_service: RedisServer, deaf: threading.Event
) -> None:
    """What came meanwhile went under the same number once, and was left out as known."""

    async def unheard(publisher: Publisher, board: Board, line: Line) -> None:
        for number in range(4):
            board.add(problem(number))
            deaf.set() if number % 2 else deaf.clear()
            assert await publisher.send() != deaf.is_set()
        deaf.clear()
        assert await publisher.send()

    run(redis_service, unheard)
    assert recorded(redis_service) == list(range(4))


def test_a_batch_that_was_on_its_way_when_sending_was_cancelled_is_recorded_once(redis_service: RedisServer) -> None:
    async def cut_off(publisher: Publisher, board: Board, line: Line) -> None:
        board.add(problem(0))
        assert await publisher.send()
        board.add(problem(1))
        with redis_service.halted():
            sending = asyncio.create_task(publisher.send())
            await asyncio.sleep(0)  # it waits for an answer now
            await cancelled([sending])
        board.add(problem(2))
        assert await publisher.send()

    run(redis_service, cut_off)
    assert recorded(redis_service) == [0, 1, 2]


def test_a_batch_that_redis_has_is_not_said_again_when_what_is_done_beside_it_fails(
    redis_service: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number was spent, and it was recorded twice."""

    async def failing(*_args: Any, **_options: Any) -> None:
        raise redis.exceptions.ConnectionError("away")

    async def hindered(publisher: Publisher, board: Board, line: Line) -> None:
        assert isinstance(line, RedisLine)
        for name in ("xtrim", "expire"):
            monkeypatch.setattr(line._redis, name, failing)
        board.add(problem(0))
        await publisher.send()
        board.add(problem(1))
        await publisher.send()

    run(redis_service, hindered)
    assert recorded(redis_service) == [0, 1]


def test_steps_that_are_asked_for_are_read_and_nonsense_among_them_is_not(redis_service: RedisServer) -> None:
    asked: list[frozenset[int]] = []

    async def work(publisher: Publisher, board: Board, line: Line) -> None:
        asked.append(await line.wanted())
        redis_service.client().sadd(requested_timelines_key("job", 1), 3, 40, "x", -1)
        asked.append(await line.wanted())

    run(redis_service, work)
    assert asked == [frozenset(), {3, 40}]


def test_a_bucket_gives_its_burst_then_its_rate_and_makes_a_debtor_wait() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        bucket = Bucket(rate=100, burst=50)
        assert bucket.level() == 50
        await bucket.paid()
        bucket.spend(100)
        assert bucket.level() == 0
        await bucket.paid()
        assert loop.time() - began >= 0.49, "from before the bucket was made: a busy machine waits within it"

    asyncio.run(main())
