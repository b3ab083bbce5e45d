"""A disk that takes nothing ends no attempt without a word, and keeps none from being seen to train."""

from __future__ import annotations

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import pytest

from contracts.names import events_stream
from contracts.telemetry.steps import PhaseItem
from tests.support.processes import RedisServer
from workers.host.attempts import AttemptDir, socket_root
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


def test_an_attempt_whose_socket_cannot_be_made_is_told_with_the_reason(
    redis_service: RedisServer, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost without one."""

    async def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> str:
        monkeypatch.setattr(asyncio, "start_unix_server", full)
        return await supervised(redis_service, attempt).run()

    assert asyncio.run(main()) == "failed"
    assert "No disk space on testhost: No space left on device" in reports(redis_service)[-1]["exit"]["reason"]
    assert not (attempt.run_dir / "socket").exists()


def test_a_socket_has_its_place_where_the_temporary_folder_is_too_deep_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for folder, root in ((deep, Path("/tmp")), (Path("/var/tmp"), Path("/var/tmp"))):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert socket_root() == root
