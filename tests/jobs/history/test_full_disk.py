"""A board's full disk: the recorder says so, and goes on where it was once there is room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.models import Attempt, Lease
from jobs.runs.history.recording import attempt_recorder as recording
from jobs.runs.history.recording.recorder import NAME, HistoryRecorder
from tests.jobs.history.test_recorder import expected, totals
from tests.jobs.history.told import Sender, run
from tests.support.processes import fill_disk, mount_small_disk


def test_while_a_full_disk_takes_nothing_it_is_not_well_and_says_so_in_a_line(
    attempt: Attempt,
    tmp_path: Path,
    settings: Any,
    live_redis: redis.Redis,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_well() -> bool:
        Lease.objects.filter(name=NAME).update(ticked=None)
        recorder.run_once()
        return Lease.objects.get(name=NAME).ticked is not None

    with mount_small_disk(tmp_path / "disk") as disk:
        settings.HISTORY_DIR = disk / "history"
        settings.HISTORY_DIR.mkdir()
        fill_disk(disk)
        recorder = HistoryRecorder()
        sender = Sender(live_redis, attempt.job_id)
        for told in run(2, 5):
            sender.send(told)
        assert not is_well(), "what it tried to write"
        monkeypatch.setattr(recording, "COMMIT_INTERVAL_S", 600.0)
        assert not is_well(), "nothing was due to be written, and what was heard is on no disk"
        assert [one.exc_info for one in caplog.records if "The disk of the board is full." in one.message] == [None]
        monkeypatch.setattr(recording, "COMMIT_INTERVAL_S", 0.0)
        (disk / "filling").unlink()
        assert is_well()
        recorder.close()
        assert totals(settings.HISTORY_DIR, attempt.job_id) == expected(2, 5)
