"""What ranks write is handed on to the last line, also past a disk that fails for a moment."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

from contracts.telemetry.steps import LogItem
from tests.support.patience import patient
from workers.host.supervisor.follow import follow
from workers.host.supervisor.tail import LogTail


class Faulty(LogTail):
    """Whose disk cannot be read the first time."""

    failed = False

    def read(self, *, final: bool = False) -> list[LogItem]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(final=final)


def test_a_disk_that_fails_once_costs_no_line(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("one\n")
    tail = Faulty(tmp_path, range(0), 1000, frozenset({os.geteuid()}))
    heard: list[str] = []

    async def told() -> None:
        over = asyncio.Event()
        following = asyncio.create_task(follow(lambda: tail, lambda item: heard.extend(item["lines"]), over))
        while not heard:
            assert not following.done()
            await asyncio.sleep(0)
        log.write_text("one\nthe last, unfinished")
        over.set()
        await following

    asyncio.run(asyncio.wait_for(told(), patient(20)))
    assert heard == ["one", "the last, unfinished"]
