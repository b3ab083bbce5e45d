"""Log tails: complete lines, limited reads, counted gaps, and only valid log files."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest

from contracts.telemetry.items import LogItem
from contracts.terminal_text import HEAD_CHARS, MAX_LINE_CHARS
from tests.support.processes import scale_timeout
from workers.host.rank_files import LAUNCHER_RANK, limit_log_size
from workers.host.supervisor.log_tail import (
    MAX_COUNTED_BYTES,
    MAX_READ_BYTES,
    LogTail,
    follow_logs,
)

MEBI = 2**20


def make_tail(folder: Path, log_bytes: int = 64 * MEBI) -> LogTail:
    return LogTail(folder, range(4), log_bytes, frozenset({os.geteuid()}))


def rank_log(folder: Path, rank: int, name: str = "stdout.log") -> Path:
    path = folder / "none_abc" / "attempt_0" / str(rank) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_reads_complete_lines_and_the_rest_at_the_end(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 3), make_tail(tmp_path)
    path.write_bytes(b"one\ntw")
    assert [(i["rank"], i["first"], i["lines"], i["open"]) for i in tail.read()] == [(3, 0, ["one"], ["tw"])]
    assert tail.read() == []
    with path.open("ab") as out:
        out.write(b"o\nthree")
    assert [(i["first"], i["lines"]) for i in tail.read()] == [(1, ["two"])]
    assert [(i["first"], i["lines"]) for i in tail.read(final=True)] == [(2, ["three"])]
    assert tail.get_last_lines(3) == ["one", "two", "three"]


def test_replaces_invalid_utf8_and_shortens_long_lines(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_bytes(b"\xff\x00ok\n" + b"y" * 100_000 + b"\n")
    (item,) = make_tail(tmp_path).read()
    assert item["rank"] == LAUNCHER_RANK
    first, second = item["lines"]
    assert first == "\ufffdok"
    assert second.startswith("y" * HEAD_CHARS + " … [100,000 characters in this line, ")
    assert len(second) <= MAX_LINE_CHARS


def test_counts_every_skipped_line_of_a_flood(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0), make_tail(tmp_path)
    lines = 5 * MAX_READ_BYTES // 8
    path.write_text("".join(f"{number:07d}\n" for number in range(lines)))
    (item,) = tail.read()
    assert item["skipped"] + len(item["lines"]) == lines
    assert item["first"] == item["skipped"] == int(item["lines"][0])
    assert sum(len(line) + 1 for line in item["lines"]) <= MAX_READ_BYTES


def bar(percent: int) -> bytes:
    return f"\rEpoch 1: {percent:3d}%|{'#' * (percent // 10):10s}| [00:00<00:40, 10.0it/s]".encode()


def test_shows_the_current_state_of_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.supervisor.log_tail.OPEN_INTERVAL_S", 0.0)
    path, tail = rank_log(tmp_path, 0, "stderr.log"), make_tail(tmp_path)
    items = []
    with path.open("ab", buffering=0) as out:
        for percent in range(101):
            out.write(bar(percent))
            items += tail.read()
        assert [item["lines"] for item in items] == [[]] * 101
        assert [item["open"] for item in items] == [[bar(percent).decode().strip()] for percent in range(101)]
        rank_log(tmp_path, 0).write_bytes(b"step 1\n")
        (item,) = tail.read()
        assert (item["lines"], item["open"]) == (["step 1"], [bar(100).decode().strip()])
        out.write(b"\nTraceback\n")
        (item,) = tail.read()
    assert (item["first"], item["lines"], item["open"]) == (1, [bar(100).decode().strip(), "Traceback"], [])
    assert tail.get_last_lines(0) == ["step 1", bar(100).decode().strip(), "Traceback"]


def test_sends_the_state_of_a_bar_once_per_second(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0, "stderr.log"), make_tail(tmp_path)
    path.write_bytes(bar(1))
    assert [item["open"] for item in tail.read()] == [[bar(1).decode().strip()]]
    path.write_bytes(bar(1) + bar(2))
    assert tail.read() == []
    assert [item["lines"] for item in tail.read(final=True)] == [[bar(2).decode().strip()]]


def test_a_flood_of_carriage_returns_costs_little(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0, "stderr.log"), make_tail(tmp_path)
    path.write_bytes(b"\r 17%" * 1_000_000 + b"\r100%")
    started = time.process_time()
    (item,) = tail.read()
    assert time.process_time() - started < 0.25, "reads take place each 0.25 s"
    assert item["open"] == ["100%"]
    assert "skipped" not in item


def test_a_flood_of_rewritten_lines_costs_little_and_is_counted(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0, "stderr.log"), make_tail(tmp_path)
    path.write_bytes(b"\r 17%\n" * 300_000)
    started = time.process_time()
    items = [*tail.read(), *tail.read(final=True)]
    assert time.process_time() - started < 1
    assert sum(len(item["lines"]) + item.get("skipped", 0) for item in items) == 300_000


def test_skips_a_sparse_log_of_terabytes_and_states_its_bytes(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0), make_tail(tmp_path)
    path.write_text("before\n")
    assert tail.read()[0]["lines"] == ["before"]
    with path.open("r+b") as out:
        out.truncate(4 * 2**40)
        out.seek(0, os.SEEK_END)
        out.write(b"\nafter\n")
    started = time.monotonic()
    (item,) = tail.read()
    assert time.monotonic() - started < 20, "4 TB take hours"
    unseen = path.stat().st_size - len("before\n") - MAX_READ_BYTES - MAX_COUNTED_BYTES
    assert item["lines"][0] == f"[{unseen:,} bytes of this log are not shown, and their lines are not counted]"
    assert item["lines"][-1] == "after"


def fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def hard_link(path: Path, secret: Path) -> None:
    path.hardlink_to(secret)


def folder(path: Path, secret: Path) -> None:
    path.mkdir()


def linked_folder(path: Path, secret: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(secret.parent)


def linked_run(path: Path, secret: Path) -> None:
    path.parent.rmdir()
    path.parent.parent.rmdir()
    path.parent.parent.symlink_to(secret.parent.parent)


@pytest.mark.parametrize("make", [fifo, link, hard_link, folder, linked_folder, linked_run])
def test_opens_only_regular_files_of_the_job(tmp_path: Path, make: object) -> None:
    """Check FIFOs and links, which once blocked the supervisor and exposed other files."""
    assert callable(make)
    secret = rank_log(tmp_path / "elsewhere", 0)
    secret.write_text("secret\n")
    logs = tmp_path / "logs"
    path = rank_log(logs, 0)
    make(path, secret)
    rank_log(logs, 1, "stderr.log").write_text("mine\n")
    items = make_tail(logs).read(final=True)
    assert [(item["rank"], item["lines"]) for item in items] in ([(1, ["mine"])], [])
    assert make is linked_run or items != []


def test_rejects_a_log_of_another_user(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_text("secret\n")
    assert LogTail(tmp_path, range(4), MEBI, frozenset({os.geteuid() + 1})).read() == []


def test_reads_only_files_that_torchrun_writes(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_text("mine\n")
    for path in (rank_log(tmp_path, 4), rank_log(tmp_path, 0, "other.log"), tmp_path / "another.log"):
        path.write_text("not mine\n")
    second = tmp_path / "other_run" / "attempt_0" / "0"
    second.mkdir(parents=True)
    (second / "stdout.log").write_text("not mine\n")
    os.utime(tmp_path / "other_run")
    assert [item["lines"] for item in make_tail(tmp_path).read()] == [["mine"]]


def test_limited_log_keeps_its_start_and_end(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0), make_tail(tmp_path, log_bytes=4 * MEBI)
    written = 0
    result: list[LogItem] = []
    with path.open("wb") as rank:  # as torchrun opens it: not for appending, so the place to write never moves
        for _ in range(64):
            rank.write(b"".join(b"%07d\n" % (number) for number in range(written, written + 65536)))
            rank.flush()
            written += 65536
            result += tail.read()
            assert path.stat().st_blocks * 512 <= 5 * MEBI
    assert path.stat().st_size == written * 8
    assert path.stat().st_blocks * 512 <= 4 * MEBI + 8192
    body = path.read_bytes()
    assert body.startswith(b"0000000\n0000001\n")
    assert body.endswith(b"%07d\n" % (written - 1))
    assert b" bytes were removed here: the limit of a log is 4,194,304 bytes]" in body[: 2 * MEBI]
    assert sum(len(item["lines"]) + item.get("skipped", 0) for item in result) == written


def test_truncates_a_log_on_a_file_system_without_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoHoles:
        @staticmethod
        def fallocate(*_: object) -> int:
            return -1

    monkeypatch.setattr("workers.host.rank_files._libc", NoHoles)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 3 * MEBI)
    descriptor = os.open(path, os.O_RDWR)
    try:
        limit_log_size(descriptor, MEBI)
    finally:
        os.close(descriptor)
    assert path.read_bytes() == b"\n[3,145,728 bytes were removed here: the limit of a log is 1,048,576 bytes]\n"


class Faulty(LogTail):
    """A log tail whose first read fails."""

    failed = False

    def read(self, *, final: bool = False) -> list[LogItem]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(final=final)


def test_loses_no_line_when_a_read_fails_once(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("one\n")
    tail = Faulty(tmp_path, range(0), 1000, frozenset({os.geteuid()}))
    received: list[str] = []

    async def result() -> None:
        over = asyncio.Event()
        following = asyncio.create_task(follow_logs(lambda: tail, lambda item: received.extend(item["lines"]), over))
        while not received:
            assert not following.done()
            await asyncio.sleep(0)
        log.write_text("one\nthe last, unfinished")
        over.set()
        await following

    asyncio.run(asyncio.wait_for(result(), scale_timeout(20)))
    assert received == ["one", "the last, unfinished"]
