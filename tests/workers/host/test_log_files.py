"""Parts of log files for the board."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from contracts.codec import BadMessageError, decode_log_part, validate_log_order
from contracts.logs import MAX_LOG_PART_BYTES, VERSION, LogPart
from tests.support.host import build_launch_order as launch
from tests.workers.host.supervisor.test_log_tail import fifo, hard_link, link, linked_folder, linked_run, rank_log
from workers.disk import write_json
from workers.host.attempts import AttemptDir, get_attempt_dir
from workers.host.rank_files import BLOCK_BYTES, limit_log_size, read_log_part, read_range
from workers.host.settings import HostSettings

MEBI = 2**20


def settings(folder: Path) -> HostSettings:
    return HostSettings("", "here", 2, "cpu", folder, folder, folder, folder, "workers.trainer")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    """Return an attempt with ranks 2 and 3 on the second host of a gang."""
    made = get_attempt_dir(tmp_path, "job", 1)
    made.host_dir.mkdir(parents=True)
    nodes = [{"host": name, "address": "", "ranks": 2} for name in ("anna", "bert")]
    write_json(made.order_file, {**launch(slots=[0, 1]), "gang": {"node": 1, "nodes": nodes, "lease_s": 60.0}})
    made.logs.mkdir(parents=True)
    return made


def make_request(attempt: AttemptDir, rank: int = 2, file: str = "stdout", offset: int = 0) -> LogPart:
    result: dict[str, Any] = {"job": attempt.job, "attempt": attempt.attempt, "rank": rank, "file": file}
    order = validate_log_order({"v": VERSION, **result, "offset": offset, "question": "0" * 32, "expires": 1.0})
    return decode_log_part(read_log_part(order, settings(attempt.run_dir)))


def whole(attempt: AttemptDir, **which: Any) -> bytes:
    part = make_request(attempt, **which)
    text, size = part["data"], part["size"]
    while part["next"] < size:
        part = make_request(attempt, **which, offset=part["next"])
        text += part["data"]
    assert part["problem"] == ""
    return text


def test_reads_a_log_in_parts_to_the_last_byte(attempt: AttemptDir) -> None:
    text = b"".join(b"%07d\n" % number for number in range(3 * MAX_LOG_PART_BYTES // 8 + 100))
    rank_log(attempt.logs, 0).write_bytes(text)
    rank_log(attempt.logs, 1, "stderr.log").write_bytes(b"of rank 3")
    (attempt.logs / "launcher.log").write_bytes(b"of the launcher")
    assert whole(attempt) == text
    assert whole(attempt, rank=3, file="stderr") == b"of rank 3"
    assert whole(attempt, rank=-1, file="launcher") == b"of the launcher"


def test_skips_a_hole_and_returns_its_notice(attempt: AttemptDir) -> None:
    path = rank_log(attempt.logs, 0)
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(4 * MEBI // 8)))
    descriptor = os.open(path, os.O_RDWR)
    limit_log_size(descriptor, MEBI)
    os.close(descriptor)
    text = whole(attempt)
    assert b"\0" not in text
    assert b"bytes were removed here: the limit of a log is 1,048,576 bytes]" in text
    assert text.startswith(b"0000000\n")
    assert text.endswith(b"%07d\n" % (4 * MEBI // 8 - 1))
    part = make_request(attempt)
    assert part["kept"] < MEBI < part["size"] == 4 * MEBI


def test_reads_a_sparse_log_of_terabytes_in_two_parts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as out:
        out.write(b"before\n")
        out.seek(4 * 2**40)
        out.write(b"after\n")
    descriptor = os.open(path, os.O_RDONLY)
    size = path.stat().st_size
    first = read_range(descriptor, 0, size)
    second = read_range(descriptor, first.next, size)
    assert (first.data, first.next, second.data, second.next) == (b"before\n", BLOCK_BYTES, b"after\n", size)
    assert read_range(descriptor, size + 5, size).data == b""
    os.truncate(path, 2 * 4 * 2**40)
    assert read_range(descriptor, size, 2 * 4 * 2**40).data.strip(b"\0") == b""
    os.close(descriptor)


@pytest.mark.parametrize("make", [fifo, link, hard_link, linked_folder, linked_run])
def test_rejects_files_that_are_not_logs_of_the_job(attempt: AttemptDir, tmp_path: Path, make: Any) -> None:
    secret = rank_log(tmp_path / "elsewhere", 0)
    secret.write_text("secret\n")
    make(rank_log(attempt.logs, 0), secret)
    part = make_request(attempt)
    assert part["problem"] == "This host has no readable stdout log of this attempt."
    assert part["data"] == b""


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ({"rank": 0}, "Rank 0 did not run on this host."),
        ({"rank": 2, "file": "launcher"}, "Rank 2 has no launcher log."),
        ({"rank": -1}, "Rank -1 has no stdout log."),
        ({"rank": 2}, "This host has no readable stdout log of this attempt."),
    ],
)
def test_reports_a_missing_log(attempt: AttemptDir, which: dict[str, Any], words: str) -> None:
    assert make_request(attempt, **which)["problem"] == words


def test_reports_a_pruned_attempt(attempt: AttemptDir) -> None:
    attempt.order_file.unlink()
    assert make_request(attempt)["problem"] == "This host no longer stores the log of this attempt."


@pytest.mark.parametrize("job", ["../../etc", "a/b", "", "A", "x\0"])
def test_log_order_contains_no_path(job: str) -> None:
    order = {"v": 1, "job": job, "attempt": 1, "rank": 0, "file": "stdout", "offset": 0, "question": "0" * 32}
    with pytest.raises(BadMessageError, match="job"):
        validate_log_order({**order, "expires": 1.0})
    with pytest.raises(BadMessageError, match="question"):
        validate_log_order({**order, "job": "job", "question": "../x", "expires": 1.0})
