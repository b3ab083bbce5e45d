"""`manage.py backup` and `restore` on full disks leave no partial files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from jobs.models import Job
from jobs.operations import backup
from jobs.queue import actions
from tests.planner.wrong_specs import GOOD
from tests.support.processes import ROOT, base_environment, mount_small_disk

FULL = "No space left on device"


@pytest.fixture
def saved(transactional_db: None, owner: User, settings: Any, tmp_path: Path) -> Path:
    """Back up a job, and an import that does not fit twice on a disk of 1 MB."""
    settings.STATE_DIR, settings.HISTORY_DIR = tmp_path / "state", tmp_path / "state" / "history"
    (tmp_path / "state" / "imports").mkdir(parents=True)
    (tmp_path / "state" / "imports" / "trace").write_bytes(os.urandom(600_000))
    actions.submit(owner, GOOD)
    backup.backup(tmp_path / "saved.tar")
    return tmp_path / "saved.tar"


@pytest.mark.extended
def test_failed_backup_leaves_no_file(saved: Path, tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "500k") as disk:
        with pytest.raises(CommandError, match=FULL):
            call_command("backup", str(disk / "new.tar"))
        assert list(disk.iterdir()) == []


def test_restore_without_space_for_files_changes_nothing(saved: Path, tmp_path: Path, settings: Any) -> None:
    User.objects.create_user("later")
    with mount_small_disk(tmp_path / "disk") as disk:
        settings.STATE_DIR, settings.HISTORY_DIR = disk, disk / "history"
        (disk / "imports").mkdir()
        (disk / "imports" / "other").write_bytes(b"another trace")
        with pytest.raises(CommandError, match=f"^Cannot copy the restored files to their folder: .*{FULL}"):
            call_command("restore", str(saved), replace=True)
        assert [path.name for path in disk.rglob("*")] == ["imports", "other"]
    assert (Job.objects.count(), User.objects.count()) == (1, 2)


def test_restore_without_space_for_the_database_fails(saved: Path, tmp_path: Path, settings: Any) -> None:
    with mount_small_disk(tmp_path / "disk", "300k") as disk:
        environment = {
            **base_environment(),
            "MESHBOARD_SECRET_KEY": settings.SECRET_KEY,
            "MESHBOARD_REDIS_URL": "redis://127.0.0.1:1/0",
            "MESHBOARD_STATE_DIR": str(disk),
            "MESHBOARD_HTTPS": "0",
        }
        argv = [sys.executable, "manage.py", "restore", str(saved)]
        process = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr.strip()) == (1, "CommandError: database or disk is full")
