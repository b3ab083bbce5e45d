"""What a supervisor still says once the training is over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contracts.codec import decode_batch
from contracts.names import telemetry_stream
from contracts.telemetry.steps import LogItem
from tests.support.processes import RedisServer
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings
from workers.host.supervisor import __main__ as supervising
from workers.host.supervisor import publish
from workers.host.supervisor.board import LATE_LOG_BYTES
from workers.host.supervisor.line.over_redis import RedisLine

LINES = 4000


def farewell(server: RedisServer, attempt: AttemptDir) -> list[Any]:
    """Log items that the board has of a job that printed LINES lines at its end."""
    root = attempt.run_dir
    settings = HostSettings(server.url, "testhost", 4, "cpu", root, root, root, root, "workers.trainer")

    async def main() -> None:
        line = RedisLine(attempt, settings)
        supervisor = supervising.Supervisor(attempt, settings, root / "socket", line)
        supervisor.board.add(LogItem(kind="log", rank=0, time=0.0, first=0, lines=["x" * 200] * LINES))
        await supervisor._say_goodbye()

    asyncio.run(main())
    entries: Any = server.client().xrange(telemetry_stream("job", 1))
    found = [item for _, fields in entries for item in decode_batch(fields[b"b"])["items"]]
    return [item for item in found if item["kind"] == "log"]


def test_a_loud_jobs_last_lines_are_waited_for(
    redis_service: RedisServer, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is among them; they were left out, and nobody was told."""
    monkeypatch.setattr(supervising, "POLL_S", 0.05)
    monkeypatch.setattr(publish, "LOG_BURST", 300_000)
    monkeypatch.setattr(publish, "LOG_BYTES_PER_S", 2**20)
    found = farewell(redis_service, attempt)
    assert found[-1]["first"] + len(found[-1]["lines"]) == LINES
    assert sum(len(item["lines"]) + item.get("skipped", 0) for item in found) == LINES
    late = sum(len(item["lines"]) for item in found) * 200 - 300_000
    assert late > LATE_LOG_BYTES // 2


def test_lines_that_are_not_said_in_time_are_counted(
    redis_service: RedisServer, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "POLL_S", 0.05)
    monkeypatch.setattr(supervising, "FAREWELL_S", 0.1)
    monkeypatch.setattr(publish, "LOG_BURST", 300_000)
    monkeypatch.setattr(publish, "LOG_BYTES_PER_S", 1000)
    found = farewell(redis_service, attempt)
    assert found[-1]["lines"] == []
    assert found[-1]["first"] == LINES
    assert sum(len(item["lines"]) + item.get("skipped", 0) for item in found) == LINES
