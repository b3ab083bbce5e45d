"""Record all telemetry exactly once, whatever process dies."""

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
from tests.jobs.history.sample_telemetry import BEGAN, Sender, batch, cell, generate_run, rows, step, traffic
from tests.support.postgres import get_database_url
from tests.support.processes import ROOT, RedisServer, base_environment, scale_timeout, wait_until


def totals(root: Path, job: str, column: str = "payload_bytes") -> dict[tuple[int, str, str], int]:
    """Return the sum of the rows of each counter."""
    found: Counter[tuple[int, str, str]] = Counter()
    for row in rows(root, job, "traffic"):
        found[row["rank"], row["phase"], row["op"]] += row[column]
    return dict(found)


def expected(ranks: int, steps: int) -> dict[tuple[int, str, str], int]:
    """Return the totals of `generate_run`."""
    of_rank = {
        ("step", "all_reduce"): 10_000 * steps,
        ("step", "all_gather"): 1000 * steps,
        ("setup", "all_reduce"): 3000,
    }
    return {(rank, *key): total for rank in range(ranks) for key, total in of_rank.items()}


def test_ended_run_is_complete_in_one_file_per_table(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for batch_data in generate_run(2, 20):
        sender.send(batch_data)
        recorder.run_once()
    last = sender.send(batch(11, {"kind": "eval", "rank": 0, "time": BEGAN + 11, "step": 20, "loss": 4.5}))
    end(attempt)
    recorder.run_once()
    manifest = HistoryFolder(root, attempt.job_id, 1).read_manifest()
    assert manifest["ended"]
    assert manifest["nodes"]["0"]["after"] == last
    assert {table: len(parts) for table, parts in manifest["parts"].items()} == {"steps": 1, "traffic": 1, "marks": 1}
    assert len(list((root / attempt.job_id / "1").glob("*.parquet"))) == 3, "replaced files are deleted"
    assert totals(root, attempt.job_id) == expected(2, 20)
    assert totals(root, attempt.job_id, "calls")[0, "step", "all_reduce"] == 200
    stored = rows(root, attempt.job_id, "steps")
    assert [(row["rank"], row["step"]) for row in stored] == [(r, s) for s in range(1, 21) for r in range(2)]
    assert stored[0]["loss"] == 4.99
    assert stored[1]["loss"] is None
    assert dict(stored[0]["exposed"]) == pytest.approx({"dp": 0.1})
    marks = rows(root, attempt.job_id, "marks")
    assert [(mark["kind"], mark["value"]) for mark in marks] == [("validation", 4.5), ("end", None)]
    attempt.refresh_from_db()
    assert attempt.recorded is not None


def test_increase_counts_in_its_second(
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


def test_interrupted_commit_is_repeated_without_duplicates(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write the files of rows without the manifest, as after kill -9 or on a full disk."""
    sender = Sender(live_redis, attempt.job_id)
    tell = HistoryFolder._write_manifest
    for number, batch_data in enumerate(generate_run(2, 12)):
        sender.send(batch_data)
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
def test_killed_recorder_loses_and_duplicates_nothing(
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
    runs, bulk = (
        list(generate_run(2, 150)),
        {"kind": "log", "rank": 0, "time": BEGAN, "first": 0, "lines": ["x" * 4000] * 40},
    )

    def send(some: list[Any]) -> None:
        for batch_data in some:
            sender.send({**batch_data, "items": [*batch_data["items"], bulk]})

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


def test_continues_after_a_restart_of_redis(
    attempt: Attempt, root: Path, live_redis: redis.Redis, redis_service: RedisServer, recorder: HistoryRecorder
) -> None:
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 6))
    for some in batches[:3]:
        sender.send(some)
    recorder.run_once()
    redis_service.stop()
    for _ in range(3):
        recorder.run_once()
    redis_service.start()
    for some in batches[3:]:
        sender.send(some)
    recorder.run_once()
    assert totals(root, attempt.job_id) == expected(1, 6)
    assert "marks" not in HistoryFolder(root, attempt.job_id, 1).read_manifest()["parts"]


def test_redis_restored_from_an_older_dump_duplicates_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    """The stream has old entries with new ids, and an older clock numbers the new entries."""
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 6))
    for some in batches[:4]:
        sender.send(some)
    recorder.run_once()
    old = live_redis.xrange(sender.key)
    live_redis.delete(sender.key)
    for number, (_, fields) in enumerate(old[2:]):
        live_redis.xadd(sender.key, fields, id=f"{1000 + number}-0")
    for number, some in enumerate(batches[4:]):
        body = msgpack.packb({**some, "job": attempt.job_id})
        live_redis.xadd(sender.key, {"b": body, "n": 4 + number}, id=f"{2000 + number}-0")
    recorder.run_once()
    recorder.run_once()
    assert totals(root, attempt.job_id) == expected(1, 6)
    assert len(rows(root, attempt.job_id, "steps")) == 6


def test_trimmed_entries_are_a_gap_with_exact_totals(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 20))
    for some in batches[:4]:
        sender.send(some)
    recorder.run_once()
    for some in batches[4:16]:
        last = sender.send(some)
    live_redis.xtrim(sender.key, minid=last, approximate=False)
    recorder.run_once()
    for some in batches[16:]:
        sender.send(some)
    recorder.run_once()
    assert totals(root, attempt.job_id) == expected(1, 20)
    [gap] = rows(root, attempt.job_id, "marks")
    assert (gap["kind"], gap["time"] - BEGAN, gap["value"] - BEGAN) == ("gap", 2.0, 8.0)
    assert gap["text"] == "11 telemetry entries were deleted before the recorder read them"
    in_gap = [row for row in rows(root, attempt.job_id, "traffic") if row["second"] == BEGAN + 2]
    assert sum(row["calls"] for row in in_gap if row["op"] == "all_reduce" and row["phase"] == "step") == 10 + 120


@pytest.mark.parametrize("fields", [{"b": b"no msgpack"}, {}])
def test_trimmed_entries_before_an_invalid_entry_are_a_gap(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, fields: dict[Any, Any]
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for batch_data in generate_run(1, 2):
        sender.send(batch_data)
    live_redis.xadd(sender.key, {**fields, "n": 9})
    recorder.run_once()
    [gap] = rows(root, attempt.job_id, "marks")
    assert (gap["kind"], gap["time"] - BEGAN) == ("gap", 1.0)
    assert gap["text"] == "7 telemetry entries were deleted before the recorder read them"
    folder = HistoryFolder(root, attempt.job_id, 1)
    assert folder.read_state(folder.read_manifest())["lost"]


def test_second_recorder_waits_for_the_first(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 4))
    second = HistoryRecorder()
    for some in batches[:2]:
        sender.send(some)
    recorder.run_once()
    second.run_once()
    assert not second._open
    for some in batches[2:]:
        sender.send(some)
    recorder.close()
    second.run_once()
    second.close()
    assert totals(root, attempt.job_id) == expected(1, 4)


def test_outdated_recorder_writes_nothing(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop the recorder longer than its lease, and resume it in the middle of a pass."""
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 9))
    other = HistoryRecorder()
    for made in (recorder, other):
        monkeypatch.setattr(made._lease, "hold", lambda: True)
    for some in batches:
        sender.send(some)
        recorder.run_once()
        other.run_once()
    recorder.run_once()
    other.close()
    assert totals(root, attempt.job_id) == expected(1, 9)
    assert len(rows(root, attempt.job_id, "steps")) == 9


def test_reads_the_stream_of_each_member(
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
    batch_data = {
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
    second.send(batch(1, step(1, 1, 1, cell(10)), batch_data, gauge, host="host-b", clock=ahead))
    recorder.run_once()
    assert sorted(row["rank"] for row in rows(root, attempt.job_id, "steps")) == [0, 1]
    [call] = rows(root, attempt.job_id, "calls")
    assert call["issued"] == pytest.approx(BEGAN + 0.5)
    assert call["ended"] == pytest.approx(BEGAN + 0.75)
    assert call["ranks"] == [0, 1]
    [stored] = rows(root, attempt.job_id, "gauges")
    assert (stored["host"], stored["cpu"], stored["resident_bytes"]) == ("host-b", 3.5, None)


def test_counts_and_skips_invalid_items(
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


def test_records_a_number_larger_than_any_float(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    """An invalid checkpoint must not stop the recording of its stream."""
    saved = {"kind": "checkpoint", "rank": 0, "time": BEGAN, "step": 1, "name": "a/1/step-00000001"}
    saved |= {"num_bytes": 2**63 - 1, "stall_s": 0.0, "save_s": 0.0, "problem": ""}
    Sender(live_redis, attempt.job_id).send(batch(1, saved, step(0, 1, 1)))
    recorder.run_once()
    assert [row["step"] for row in rows(root, attempt.job_id, "steps")] == [1]
    assert [row["value"] for row in rows(root, attempt.job_id, "marks")] == [float(2**63)]


def test_deletes_the_history_of_a_deleted_job(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    Sender(live_redis, attempt.job_id).send(batch(1, step(0, 1, 1)))
    recorder.run_once()
    assert (root / attempt.job_id).is_dir()
    Job.objects.all().delete()
    recorder.run_once()
    assert not (root / attempt.job_id).exists()


def test_attempt_without_telemetry_has_no_history(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder
) -> None:
    end(attempt, "failed")
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert not (root / attempt.job_id).exists()


def test_long_run_has_few_files(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "FILES_PER_LEVEL", 3)
    sender = Sender(live_redis, attempt.job_id)
    for batch_data in generate_run(1, 16):
        sender.send(batch_data)
        recorder.run_once()
    parts = HistoryFolder(root, attempt.job_id, 1).read_manifest()["parts"]
    assert [part["level"] for part in parts["steps"]] == [2, 1, 1, 0]
    assert totals(root, attempt.job_id) == expected(1, 16)


def test_idle_recorder_only_queries_the_database(
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
