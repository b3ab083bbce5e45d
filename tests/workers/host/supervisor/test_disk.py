"""A disk that takes nothing ends no attempt without a word, and keeps none from being seen to train."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import msgpack

from contracts.names import events_stream
from contracts.telemetry.steps import PhaseItem
from tests.support.processes import RedisServer
from workers.host.attempts import AttemptDir
from workers.host.settings import HostSettings
from workers.host.supervisor.__main__ import Supervisor
from workers.host.supervisor.line.over_redis import RedisLine


def supervised(server: RedisServer, attempt: AttemptDir) -> Supervisor:
    root = attempt.run_dir
    settings = HostSettings(server.url, "testhost", 4, "cpu", root, root, root, root, "workers.trainer")
    return Supervisor(attempt, settings, root / "socket", RedisLine(attempt, settings))


def reports(server: RedisServer) -> list[Any]:
    entries: Any = server.client().xrange(events_stream("testhost"))
    return [msgpack.unpackb(fields[b"b"])["report"] for _, fields in entries]


def test_an_attempt_trains_for_the_board_though_its_folder_is_gone(
    redis_service: RedisServer, attempt: AttemptDir
) -> None:
    """Each frame cut its rank's connection, and the job stayed at its start."""

    async def main() -> None:
        supervisor = supervised(redis_service, attempt)
        shutil.rmtree(attempt.own)
        for _ in range(2):
            await supervisor._take([PhaseItem(kind="phase", rank=0, time=0.0, phase="step")])
        await supervisor.line.close()

    asyncio.run(main())
    assert [report["state"] for report in reports(redis_service)] == ["running"]
