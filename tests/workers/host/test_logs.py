"""Parts of a log that the board asked for: all of its data, none of its holes, and nothing that is no log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from contracts.codec import BadMessageError, decode_log_part, validate_log_order
from contracts.logs import MAX_LOG_PART_BYTES, VERSION, LogPart
from tests.support.orders import order as launch
from tests.workers.host.supervisor.test_tail import fifo, hard_link, link, linked_folder, linked_run, rank_log
from workers.host.attempts import AttemptDir, attempt_dir
from workers.host.files import write_json
from workers.host.logs import answer, read_part
from workers.host.settings import HostSettings
from workers.host.supervisor.logfile import BLOCK, cap

MEBI = 2**20


def settings(folder: Path) -> HostSettings:
    return HostSettings("", "here", 2, "cpu", folder, folder, folder, folder, "workers.trainer")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    """Ranks 2 and 3 of a gang, of which this host is the second."""
    made = attempt_dir(tmp_path, "job", 1)
    made.own.mkdir(parents=True)
    nodes = [{"host": name, "address": "", "ranks": 2} for name in ("anna", "bert")]
    write_json(made.order, {**launch(slots=[0, 1]), "gang": {"node": 1, "nodes": nodes, "lease_s": 60.0}})
    made.logs.mkdir(parents=True)
    return made


def asked(attempt: AttemptDir, rank: int = 2, file: str = "stdout", offset: int = 0) -> LogPart:
    told: dict[str, Any] = {"job": attempt.job, "attempt": attempt.attempt, "rank": rank, "file": file}
    order = validate_log_order({"v": VERSION, **told, "offset": offset, "question": "0" * 32, "expires": 1.0})
    return decode_log_part(answer(order, settings(attempt.run_dir)))


def whole(attempt: AttemptDir, **which: Any) -> bytes:
    part = asked(attempt, **which)
    text, size = part["data"], part["size"]
    while part["next"] < size:
        part = asked(attempt, **which, offset=part["next"])
        text += part["data"]
    assert part["problem"] == ""
    return text


def test_a_log_is_told_part_by_part_to_the_byte(attempt: AttemptDir) -> None:
    text = b"".join(b"%07d\n" % number for number in range(3 * MAX_LOG_PART_BYTES // 8 + 100))
    rank_log(attempt.logs, 0).write_bytes(text)
    rank_log(attempt.logs, 1, "stderr.log").write_bytes(b"of rank 3")
    (attempt.logs / "launcher.log").write_bytes(b"of the launcher")
    assert whole(attempt) == text
    assert whole(attempt, rank=3, file="stderr") == b"of rank 3"
    assert whole(attempt, rank=-1, file="launcher") == b"of the launcher"


def test_a_hole_is_passed_over_and_only_the_line_about_it_is_told(attempt: AttemptDir) -> None:
    path = rank_log(attempt.logs, 0)
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(4 * MEBI // 8)))
    descriptor = os.open(path, os.O_RDWR)
    cap(descriptor, MEBI)
    os.close(descriptor)
    text = whole(attempt)
    assert b"\0" not in text
    assert b"bytes were removed here: the limit of a log is 1,048,576 bytes]" in text
    assert text.startswith(b"0000000\n")
    assert text.endswith(b"%07d\n" % (4 * MEBI // 8 - 1))
    part = asked(attempt)
    assert part["kept"] < MEBI < part["size"] == 4 * MEBI


def test_a_sparse_log_of_terabytes_costs_two_parts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as out:
        out.write(b"before\n")
        out.seek(4 * 2**40)
        out.write(b"after\n")
    descriptor = os.open(path, os.O_RDONLY)
    size = path.stat().st_size
    first = read_part(descriptor, 0, size)
    second = read_part(descriptor, first.next, size)
    assert (first.data, first.next, second.data, second.next) == (b"before\n", BLOCK, b"after\n", size)
    assert read_part(descriptor, size + 5, size).data == b""
    os.truncate(path, 2 * 4 * 2**40)
    assert read_part(descriptor, size, 2 * 4 * 2**40).data.strip(b"\0") == b""
    os.close(descriptor)


@pytest.mark.parametrize("make", [fifo, link, hard_link, linked_folder, linked_run])
def test_what_is_no_log_of_the_job_is_not_told(attempt: AttemptDir, tmp_path: Path, make: Any) -> None:
    secret = rank_log(tmp_path / "elsewhere", 0)
    secret.write_text("secret\n")
    make(rank_log(attempt.logs, 0), secret)
    part = asked(attempt)
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
def test_what_there_is_not_says_so(attempt: AttemptDir, which: dict[str, Any], words: str) -> None:
    assert asked(attempt, **which)["problem"] == words


def test_an_attempt_that_was_pruned_says_so(attempt: AttemptDir) -> None:
    attempt.order.unlink()
    assert asked(attempt)["problem"] == "This host no longer stores the log of this attempt."


@pytest.mark.parametrize("job", ["../../etc", "a/b", "", "A", "x\0"])
def test_an_order_names_no_path(job: str) -> None:
    order = {"v": 1, "job": job, "attempt": 1, "rank": 0, "file": "stdout", "offset": 0, "question": "0" * 32}
    with pytest.raises(BadMessageError, match="job"):
        validate_log_order({**order, "expires": 1.0})
    with pytest.raises(BadMessageError, match="question"):
        validate_log_order({**order, "job": "job", "question": "../x", "expires": 1.0})
