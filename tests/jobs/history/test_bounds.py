"""Keep histories within their limits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.models import Attempt, Job
from jobs.runs.history.exports import read_points
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.history.recording.attempt_recorder import AttemptRecorder
from jobs.runs.history.store import query, retention
from jobs.runs.history.store.folder import ConcurrentWriterError, HistoryFolder, get_num_bytes
from jobs.runs.history.store.retention import delete_old_histories
from tests.jobs.history.sample_telemetry import BEGAN, batch, cell, generate_run, record_batches, rows, step, traffic
from tests.jobs.history.test_recorder import expected, totals


def timeline(rank: int, number: int) -> Any:
    """Return a timeline item whose numbers do not compress."""
    noise = [random.randrange(10**6) for _ in range(200)]
    few = [0] * len(noise)
    calls = {"group": few, "sequence": list(range(1, 201)), "issued_us": noise, "blocked_us": noise, "ended_us": noise}
    calls |= {"op": ["all_reduce"] * len(noise), "payload_bytes": noise, "peer": [-1] * len(noise)}
    return {
        "kind": "timeline",
        "rank": rank,
        "time": BEGAN + number,
        "step": number,
        "began": BEGAN + number,
        "step_s": 0.5,
        "groups": [{"axis": "dp", "ranks": [0, 1], "nth": 0}],
        "calls": calls,
        "spans": {"work": ["forward"], "chunk": [0], "micro_batch": [0], "from_us": [0], "to_us": [10]},
        "left_out": 0,
    }


def test_traced_steps_are_deleted_first(root: Path, settings: Any) -> None:
    recording = record_batches(root, [batch(n, timeline(0, n), timeline(1, n), step(0, n, n)) for n in range(1, 33)])
    before = get_num_bytes(recording.manifest, retention.TRACED_TABLES)
    settings.HISTORY_RAW_BYTES = before // 2
    retention.enforce_limits(recording.folder, recording.manifest)
    assert get_num_bytes(recording.manifest, retention.TRACED_TABLES) <= before // 2
    stored = sorted({row["step"] for row in rows(root, "job", "calls")})
    assert 0 < len(stored) < 32
    assert recording.manifest["raw_dropped"] == 32 - len(stored)
    assert stored[-8:] == list(range(25, 33)), "the newest stay"
    assert {row["step"] for row in rows(root, "job", "spans")} == set(stored)
    assert len(rows(root, "job", "calls")) == 2 * 200 * len(stored), "of a step all ranks or none"
    assert len(rows(root, "job", "steps")) == 32


def test_merged_rows_keep_the_totals_of_each_rank(root: Path, settings: Any) -> None:
    noise = [
        {"kind": "gauge", "rank": 0, "time": BEGAN + n / 10, "cpu": random.random(), "resident_bytes": 10**9 + n * n}
        for n in range(1000)
    ]
    recording = record_batches(root, [*generate_run(2, 200), batch(100, *noise)])
    before = get_num_bytes(recording.manifest, retention.MERGED_TABLES)
    steps = rows(root, "job", "steps")
    settings.HISTORY_ATTEMPT_BYTES = before * 2 // 3
    retention.enforce_limits(recording.folder, recording.manifest)
    assert get_num_bytes(recording.manifest, retention.MERGED_TABLES) <= before * 2 // 3
    assert totals(root, "job") == expected(2, 200)
    merged = rows(root, "job", "steps")
    assert recording.manifest["merged_s"] > 1
    assert len(rows(root, "job", "gauges")) < 1000
    for rank in range(2):
        assert sum(row["over"] for row in merged if row["rank"] == rank) == 200
        mine = [row for row in merged if row["rank"] == rank]
        assert max(row["over"] for row in mine) > 1
        assert mine[-1] == [row for row in steps if row["rank"] == rank][-1], "the newest are as they were"
        assert dict(mine[0]["exposed"]) == pytest.approx({"dp": 0.1})
    losses = [row for row in merged if row["rank"] == 0]
    mean = sum(row["loss"] * row["over"] for row in losses) / 200
    assert mean == pytest.approx(sum(5 - n / 100 for n in range(1, 201)) / 200)


def test_only_the_last_state_of_a_progress_bar_is_stored(root: Path) -> None:
    def say(second: int, first: int, *lines: str, **more: Any) -> Any:
        return batch(second, {"kind": "log", "rank": 0, "time": BEGAN + second, "first": first, "lines": lines, **more})

    bars = [say(second, 1, open=[f"bar {second}%"]) for second in range(1, 60)]
    record_batches(root, [say(0, 0, "step 1"), *bars])
    assert [row["lines"] for row in rows(root, "job", "logs")] == [["step 1"]]
    [shown] = get_snapshot("job", 1)["open_logs"]
    assert shown == {"node": 0, "rank": 0, "time": BEGAN + 59, "first": 1, "open": ["bar 59%"]}
    record_batches(root, [say(60, 1, "bar 100%", "step 2")], job="ended")
    assert get_snapshot("ended", 1)["open_logs"] == []


@pytest.mark.parametrize("merges", [3, 5])
def test_merged_traffic_stays_steady(root: Path, merges: int) -> None:
    recording = record_batches(root, [batch(n, traffic(0, n, cell(n + 1))) for n in range(600)])
    for _ in range(merges):
        assert retention._merge(recording.folder, recording.manifest)
    width = recording.manifest["merged_s"]
    snapshot = get_snapshot("job", 1)
    assert snapshot["traffic"]["width_s"] == width
    [row] = snapshot["traffic"]["rows"]
    assert set(row["bytes"][:-1]) == {1000 * width}
    assert sum(row["bytes"]) == 600_000
    assert set(snapshot["recent"]["bytes"]) == {1000}
    sent = query.query_history(
        "job", 1, lambda tables: [one for one in read_points(tables) if one.curve.startswith("payload")]
    )
    assert {one.value for one in sent[:-1]} == {1000}
    assert [one.time - one.step for one in sent] == [BEGAN] * len(sent)


def test_old_log_lines_are_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"kind": "log", "rank": 0, "time": BEGAN + n, "first": n, "lines": [random.randbytes(400).hex()]}
        for n in range(40)
    ]
    recording = record_batches(root, [batch(n, line) for n, line in enumerate(lines)])
    monkeypatch.setattr(retention, "MAX_LOG_BYTES", get_num_bytes(recording.manifest, ("logs",)) - 1)
    retention.enforce_limits(recording.folder, recording.manifest)
    assert [row["first"] for row in rows(root, "job", "logs")] == list(range(20, 40))


def test_deletes_old_marks_of_the_most_frequent_kind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may change its phase any number of times."""
    resumed = step(0, 50, 0, ran=1)
    validated = [{"kind": "eval", "rank": 0, "time": BEGAN + n, "step": n, "loss": 4.5} for n in range(3)]
    phases = [{"kind": "phase", "rank": 0, "time": BEGAN + n, "phase": ("step", "eval")[n % 2]} for n in range(100)]
    recording = record_batches(root, [batch(100, resumed, *validated, *phases)])
    monkeypatch.setattr(retention, "MAX_MARK_BYTES", get_num_bytes(recording.manifest, ("marks",)) - 1)
    retention.enforce_limits(recording.folder, recording.manifest)
    assert get_num_bytes(recording.manifest, ("marks",)) <= retention.MAX_MARK_BYTES
    stored = rows(root, "job", "marks")
    assert [row["time"] - BEGAN for row in stored if row["kind"] == "phase"] == list(range(50, 100))
    assert [row["kind"] for row in stored if row["kind"] != "phase"] == ["resume", *["validation"] * 3]


def test_rewritten_file_can_be_merged_with_a_new_file(root: Path, settings: Any) -> None:
    """Files of DuckDB and of the recorder have one schema."""
    recording = record_batches(root, list(generate_run(2, 60)))
    settings.HISTORY_ATTEMPT_BYTES = get_num_bytes(recording.manifest, retention.MERGED_TABLES) // 2
    retention.enforce_limits(recording.folder, recording.manifest)
    recording.rows.add_item(step(0, 61, 31))
    tables = recording.rows.take()
    assert isinstance(tables["steps"], pa.Table)
    recording.folder.commit(recording.manifest, tables, recording.rows.state)
    recording.folder.compact(recording.manifest)
    assert sum(row["over"] for row in rows(root, "job", "steps")) == 121


def test_outdated_writer_does_not_damage_files_of_the_other(root: Path) -> None:
    """The lease of the writer has expired."""
    slow = record_batches(root, [batch(1, step(0, 1, 1))])
    other = AttemptRecorder(root, "job", 1)
    other.rows.add_item(step(0, 2, 2))
    other.commit()
    folder, parts = slow.folder, slow.manifest["parts"]["steps"]
    again = folder.write_file(slow.manifest, "steps", folder.read_batches("steps", parts))
    with pytest.raises(ConcurrentWriterError):
        folder.replace_files(slow.manifest, "steps", parts, [again])
    assert [row["step"] for row in rows(root, "job", "steps")] == [1, 2]


def test_deletes_traced_steps_and_then_the_oldest_histories(
    attempt: Attempt, root: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    made: dict[str, HistoryFolder] = {}
    for place in range(3):
        job = Job.objects.create(owner=attempt.job.owner, name="old", spec={}, kind="train", num_slots=1, estimate={})
        recording = record_batches(root, [batch(n, timeline(0, n), step(0, n, n)) for n in range(1, 9)], job.id)
        recording.finish("succeeded", "", now - 1000 + place)
        made[job.id] = recording.folder
    sizes = [get_num_bytes(folder.read_manifest()) for folder in made.values()]
    raw = get_num_bytes(next(iter(made.values())).read_manifest(), retention.TRACED_TABLES)
    settings.HISTORY_BYTES = sum(sizes) - raw // 2
    assert delete_old_histories()["histories' raw steps"] == 1
    oldest, *newer = made.values()
    assert get_num_bytes(oldest.read_manifest(), retention.TRACED_TABLES) == 0
    assert [folder.read_manifest()["raw_dropped"] for folder in made.values()] == [8, 0, 0]
    oldest.merge_levels(oldest.read_manifest())  # as where its end was committed and it is not in one file a table yet
    assert [get_num_bytes(folder.read_manifest(), retention.TRACED_TABLES) > 0 for folder in newer] == [True, True]
    settings.HISTORY_BYTES = sum(
        get_num_bytes(folder.read_manifest(), (*retention.MERGED_TABLES, "marks")) for folder in newer
    )
    assert delete_old_histories()["histories"] == 1
    assert not oldest.path.exists()
    assert all(folder.path.exists() for folder in newer)


def test_deletes_expired_histories_of_ended_runs_only(
    attempt: Attempt, root: Path, settings: Any, make_old: Callable[[str, float | None], Path]
) -> None:
    settings.HISTORY_DAYS, settings.HISTORY_BYTES = 7, 0
    old = make_old(attempt.job_id, time.time() - 8 * 24 * 3600)
    assert delete_old_histories()["histories over their age"] == 1
    assert not old.exists()
    running = make_old(attempt.job_id, None)
    delete_old_histories()
    assert running.exists()


@pytest.fixture
def make_old(root: Path) -> Callable[[str, float | None], Path]:
    def make(job: str, ended: float | None) -> Path:
        recording = record_batches(root, list(generate_run(1, 3)), job)
        if ended is not None:
            recording.finish("succeeded", "", ended)
        return recording.folder.path

    return make
