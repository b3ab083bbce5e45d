"""What attempts send is kept: nothing lost, nothing twice, whatever dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from django.utils import timezone

from jobs.models import Attempt, Job, Lease, Member
from jobs.runs.history.recording.recorder import NAME, HistoryRecorder
from jobs.runs.history.store import folder as folder_module
from jobs.runs.history.store.folder import HistoryFolder, NoHistoryError
from tests.jobs.history.conftest import end
from tests.jobs.history.told import BEGAN, Sender, batch, cell, rows, run, step, traffic
from tests.support.postgres import get_database_url
from tests.support.processes import ROOT, RedisServer, base_environment, scale_timeout, wait_until


def totals(root: Path, job: str, column: str = "payload_bytes") -> dict[tuple[int, str, str], int]:
    """Of each counter, what its rows add up to."""
    found: Counter[tuple[int, str, str]] = Counter()
    for row in rows(root, job, "traffic"):
        found[row["rank"], row["phase"], row["op"]] += row[column]
    return dict(found)


def expected(ranks: int, steps: int) -> dict[tuple[int, str, str], int]:
    """Of `told.run`."""
    of_rank = {
        ("step", "all_reduce"): 10_000 * steps,
        ("step", "all_gather"): 1000 * steps,
        ("setup", "all_reduce"): 3000,
    }
    return {(rank, *key): total for rank in range(ranks) for key, total in of_rank.items()}


def test_a_run_is_kept_whole_and_in_one_file_a_table_once_it_ended(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for told in run(2, 20):
        sender.send(told)
        recorder.run_once()
    last = sender.send(batch(11, {"kind": "eval", "rank": 0, "time": BEGAN + 11, "step": 20, "loss": 4.5}))
    end(attempt)
    recorder.run_once()
    manifest = HistoryFolder(root, attempt.job_id, 1).read_manifest()
    assert manifest["ended"]
    assert manifest["nodes"]["0"]["after"] == last
    assert {table: len(parts) for table, parts in manifest["parts"].items()} == {"steps": 1, "traffic": 1, "marks": 1}
    assert len(list((root / attempt.job_id / "1").glob("*.parquet"))) == 3, "what was replaced is gone"
    assert totals(root, attempt.job_id) == expected(2, 20)
    assert totals(root, attempt.job_id, "calls")[0, "step", "all_reduce"] == 200
    kept = rows(root, attempt.job_id, "steps")
    assert [(row["rank"], row["step"]) for row in kept] == [(r, s) for s in range(1, 21) for r in range(2)]
    assert kept[0]["loss"] == 4.99
    assert kept[1]["loss"] is None
    assert dict(kept[0]["exposed"]) == pytest.approx({"dp": 0.1})
    marks = rows(root, attempt.job_id, "marks")
    assert [(mark["kind"], mark["value"]) for mark in marks] == [("validation", 4.5), ("end", None)]
    attempt.refresh_from_db()
    assert attempt.recorded is not None


def test_what_rose_in_a_second_stands_in_that_second(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for time_s, count in ((0.1, 1), (0.9, 4), (1.5, 4), (7.0, 9)):
        sender.send(batch(time_s, traffic(0, time_s, cell(count))))
    recorder.run_once()
    found = [
        (row["second"] - BEGAN, row["calls"], row["payload_bytes"]) for row in rows(root, attempt.job_id, "traffic")
    ]
    assert found == [(0, 4, 4000), (7, 5, 5000)]


def test_a_commit_that_was_cut_off_anywhere_is_made_again_and_doubles_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of rows are written, the manifest that names them is not: as by kill -9 or a full disk."""
    sender = Sender(live_redis, attempt.job_id)
    tell = HistoryFolder._write_manifest
    for number, told in enumerate(run(2, 12)):
        sender.send(told)
        if number % 3 == 1:
            monkeypatch.setattr(HistoryFolder, "_write_manifest", _fail)
            recorder.run_once()
            monkeypatch.setattr(HistoryFolder, "_write_manifest", tell)
        recorder.run_once()
    assert totals(root, attempt.job_id) == expected(2, 12)
    assert len(rows(root, attempt.job_id, "steps")) == 24


def _fail(*_: Any) -> None:
    raise OSError("no space left on device")


@pytest.mark.django_db(transaction=True)
def test_killed_outright_it_loses_and_doubles_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, redis_service: RedisServer, tmp_path: Path
) -> None:
    environment = {
        **base_environment(),
        "MESHBOARD_SECRET_KEY": "a key of this test alone 0123456789 0123456789 0123456789",
        "MESHBOARD_STATE_DIR": str(tmp_path),
        "MESHBOARD_HISTORY_DIR": str(root),
        "MESHBOARD_DATABASE_URL": get_database_url(),
        "MESHBOARD_REDIS_URL": redis_service.url,
    }
    sender, folder = Sender(live_redis, attempt.job_id), HistoryFolder(root, attempt.job_id, 1)
    runs, bulk = list(run(2, 150)), {"kind": "log", "rank": 0, "time": BEGAN, "first": 0, "lines": ["x" * 4000] * 40}

    def send(some: list[Any]) -> None:
        for told in some:
            sender.send({**told, "items": [*told["items"], bulk]})

    def generation() -> int:
        try:
            return folder.read_manifest()["generation"]
        except NoHistoryError:
            return 0

    for kill in (True, False):
        before = generation()
        with (tmp_path / "recorder.log").open("ab") as log:
            argv = [sys.executable, "manage.py", "recorder"]
            process = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=log, stderr=log)
        try:
            some, runs = runs[:75], runs[75:]
            send(some)
            wait_until(lambda before=before: generation() > before, "rows were committed", 30, 0.005)
            Lease.objects.filter(name=NAME).update(holder="")  # the next one need not wait
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            process.wait(scale_timeout(10))
        finally:
            process.kill()
            process.wait()
    with_rest = HistoryRecorder(root)
    with_rest.run_once()
    with_rest.close()
    assert sender.number == 150
    assert folder.read_manifest()["nodes"]["0"]["number"] == 149
    assert totals(root, attempt.job_id) == expected(2, 150)
    seen = Counter((row["rank"], row["step"]) for row in rows(root, attempt.job_id, "steps"))
    assert seen == Counter((rank, number) for rank in range(2) for number in range(1, 151))
    assert "marks" not in folder.read_manifest()["parts"], "no gap"


def test_redis_goes_and_comes_back(
    attempt: Attempt, root: Path, live_redis: redis.Redis, redis_service: RedisServer, recorder: HistoryRecorder
) -> None:
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 6))
    for some in told[:3]:
        sender.send(some)
    recorder.run_once()
    redis_service.stop()
    for _ in range(3):
        recorder.run_once()
    redis_service.start()
    for some in told[3:]:
        sender.send(some)
    recorder.run_once()
    assert totals(root, attempt.job_id) == expected(1, 6)
    assert "marks" not in HistoryFolder(root, attempt.job_id, 1).read_manifest()["parts"]


def test_a_redis_that_came_back_from_an_older_dump_doubles_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    """The stream holds old entries under new ids, and an older clock numbers the new ones."""
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 6))
    for some in told[:4]:
        sender.send(some)
    recorder.run_once()
    old = live_redis.xrange(sender.key)
    live_redis.delete(sender.key)
    for number, (_, fields) in enumerate(old[2:]):
        live_redis.xadd(sender.key, fields, id=f"{1000 + number}-0")
    for number, some in enumerate(told[4:]):
        body = msgpack.packb({**some, "job": attempt.job_id})
        live_redis.xadd(sender.key, {"b": body, "n": 4 + number}, id=f"{2000 + number}-0")
    recorder.run_once()
    recorder.run_once()
    assert totals(root, attempt.job_id) == expected(1, 6)
    assert len(rows(root, attempt.job_id, "steps")) == 6


def test_what_was_trimmed_is_a_gap_and_the_totals_stay_exact(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 20))
    for some in told[:4]:
        sender.send(some)
    recorder.run_once()
    for some in told[4:16]:
        last = sender.send(some)
    live_redis.xtrim(sender.key, minid=last, approximate=False)
    recorder.run_once()
    for some in told[16:]:
        sender.send(some)
    recorder.run_once()
    assert totals(root, attempt.job_id) == expected(1, 20)
    [gap] = rows(root, attempt.job_id, "marks")
    assert (gap["kind"], gap["time"] - BEGAN, gap["value"] - BEGAN) == ("gap", 2.0, 8.0)
    assert gap["text"] == "11 telemetry entries were deleted before the recorder read them"
    in_gap = [row for row in rows(root, attempt.job_id, "traffic") if row["second"] == BEGAN + 2]
    assert sum(row["calls"] for row in in_gap if row["op"] == "all_reduce" and row["phase"] == "step") == 10 + 120


@pytest.mark.parametrize("fields", [{"b": b"no msgpack"}, {}])
def test_what_was_trimmed_before_an_entry_without_sense_is_a_gap_too(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, fields: dict[Any, Any]
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for told in run(1, 2):
        sender.send(told)
    live_redis.xadd(sender.key, {**fields, "n": 9})
    recorder.run_once()
    [gap] = rows(root, attempt.job_id, "marks")
    assert (gap["kind"], gap["time"] - BEGAN) == ("gap", 1.0)
    assert gap["text"] == "7 telemetry entries were deleted before the recorder read them"
    folder = HistoryFolder(root, attempt.job_id, 1)
    assert folder.read_state(folder.read_manifest())["lost"]


def test_a_second_recorder_waits_until_the_first_is_gone(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 4))
    second = HistoryRecorder()
    for some in told[:2]:
        sender.send(some)
    recorder.run_once()
    second.run_once()
    assert not second._open
    for some in told[2:]:
        sender.send(some)
    recorder.close()
    second.run_once()
    second.close()
    assert totals(root, attempt.job_id) == expected(1, 4)


def test_one_that_was_overtaken_writes_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped for longer than its lease, then woken in the middle of a turn: it takes itself to hold it still."""
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 9))
    other = HistoryRecorder()
    for made in (recorder, other):
        monkeypatch.setattr(made._lease, "hold", lambda: True)
    for some in told:
        sender.send(some)
        recorder.run_once()
        other.run_once()
    recorder.run_once()
    other.close()
    assert totals(root, attempt.job_id) == expected(1, 9)
    assert len(rows(root, attempt.job_id, "steps")) == 9


def test_members_of_a_gang_are_read_each_by_itself(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    Member.objects.create(
        attempt=attempt, node=1, host_name="host-b", first_rank=1, num_ranks=1, ordered=timezone.now()
    )
    ahead = {"offset_s": -30.0, "within_s": 0.001}
    first, second = (Sender(live_redis, attempt.job_id, node) for node in range(2))
    first.send(batch(1, step(0, 1, 1, cell(10)), host="host-a"))
    calls = {name: [0] for name in ("group", "sequence", "issued_us", "blocked_us", "ended_us", "payload_bytes")}
    calls |= {"op": ["all_reduce"], "peer": [-1], "ended_us": [250_000]}
    told = {
        "kind": "timeline",
        "rank": 1,
        "time": BEGAN + 1,
        "step": 1,
        "began": BEGAN + 30.5,  # by its own clock, 30 s ahead of the board's
        "step_s": 0.5,
        "groups": [{"axis": "dp", "ranks": [0, 1], "nth": 0}],
        "calls": calls,
        "spans": {"work": [], "chunk": [], "micro_batch": [], "from_us": [], "to_us": []},
        "left_out": 0,
    }
    gauge = {"kind": "gauge", "rank": -1, "time": BEGAN + 1, "cpu": 3.5}
    second.send(batch(1, step(1, 1, 1, cell(10)), told, gauge, host="host-b", clock=ahead))
    recorder.run_once()
    assert sorted(row["rank"] for row in rows(root, attempt.job_id, "steps")) == [0, 1]
    [call] = rows(root, attempt.job_id, "calls")
    assert call["issued"] == pytest.approx(BEGAN + 0.5)
    assert call["ended"] == pytest.approx(BEGAN + 0.75)
    assert call["ranks"] == [0, 1]
    [kept] = rows(root, attempt.job_id, "gauges")
    assert (kept["host"], kept["cpu"], kept["resident_bytes"]) == ("host-b", 3.5, None)


def test_what_makes_no_sense_is_left_out_and_counted(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    unknown = {"kind": "of a later version", "rank": 0, "time": BEGAN}
    uneven = {
        "kind": "timeline",
        "rank": 0,
        "time": BEGAN,
        "step": 1,
        "began": BEGAN,
        "step_s": 1.0,
        "groups": [],
        "calls": {n: [] for n in ("group", "op", "sequence", "issued_us", "blocked_us", "ended_us", "payload_bytes")}
        | {"peer": [1]},
        "spans": {"work": [], "chunk": [], "micro_batch": [], "from_us": [], "to_us": []},
        "left_out": 0,
    }
    sender.send(batch(1, unknown, uneven, step(0, 1, 1), step(0, 2, 1e300)))
    live_redis.xadd(sender.key, {"b": b"no msgpack", "n": 1})
    live_redis.xadd(sender.key, {"n": 2})
    sender.number = 3
    sender.send(batch(2, step(0, 2, 2)))
    recorder.run_once()
    assert [row["step"] for row in rows(root, attempt.job_id, "steps")] == [1, 2]
    folder = HistoryFolder(root, attempt.job_id, 1)
    assert folder.read_state(folder.read_manifest())["refused"] == 4


def test_a_number_that_no_float_has_is_kept_all_the_same(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    """One checkpoint of so many bytes, and nothing of its run was ever written; its stream was read again each time."""
    saved = {"kind": "checkpoint", "rank": 0, "time": BEGAN, "step": 1, "name": "a/1/step-00000001"}
    saved |= {"num_bytes": 2**63 - 1, "stall_s": 0.0, "save_s": 0.0, "problem": ""}
    Sender(live_redis, attempt.job_id).send(batch(1, saved, step(0, 1, 1)))
    recorder.run_once()
    assert [row["step"] for row in rows(root, attempt.job_id, "steps")] == [1]
    assert [row["value"] for row in rows(root, attempt.job_id, "marks")] == [float(2**63)]


def test_the_history_of_a_deleted_job_goes(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    Sender(live_redis, attempt.job_id).send(batch(1, step(0, 1, 1)))
    recorder.run_once()
    assert (root / attempt.job_id).is_dir()
    Job.objects.all().delete()
    recorder.run_once()
    assert not (root / attempt.job_id).exists()


def test_an_attempt_that_sent_nothing_leaves_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    end(attempt, "failed")
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert not (root / attempt.job_id).exists()


def test_a_long_run_has_few_files(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "FILES_PER_LEVEL", 3)
    sender = Sender(live_redis, attempt.job_id)
    for told in run(1, 16):
        sender.send(told)
        recorder.run_once()
    parts = HistoryFolder(root, attempt.job_id, 1).read_manifest()["parts"]
    assert [part["level"] for part in parts["steps"]] == [2, 1, 1, 0]
    assert totals(root, attempt.job_id) == expected(1, 16)


def test_without_work_it_asks_the_database_and_nothing_else(
    db: None, root: Path, recorder: HistoryRecorder, django_assert_max_num_queries: Any, live_redis: redis.Redis
) -> None:
    recorder.run_once()
    before: Any = live_redis.info("stats")["total_commands_processed"]
    with django_assert_max_num_queries(4):
        recorder.run_once()
    after: Any = live_redis.info("stats")["total_commands_processed"]
    assert after - before == 1, "our own question"
    assert Lease.objects.get(name=NAME).ticked is not None
    assert not root.exists()
