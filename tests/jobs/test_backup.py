"""`manage.py backup` and `restore` on SQLite and PostgreSQL, also during writes."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.core import serializers
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.models.signals import post_save, pre_save
from django.utils import timezone
from knox.models import AuthToken

from jobs.models import Attempt, Host, Job, Lease
from jobs.operations import backup
from jobs.queue import actions
from jobs.runs.history.store.folder import HistoryFolder
from jobs.runs.history.store.schema import TABLES
from tests.jobs.sample_rows import fill_tables
from tests.planner.wrong_specs import GOOD
from tests.support.postgres import use_database
from tests.support.processes import ROOT, base_environment, scale_timeout
from tests.support.tiers import extend_after


@pytest.fixture(autouse=True)
def _oldest_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave like the oldest supported Python, whose tarfile has no filters."""

    def extractall(self: tarfile.TarFile, path: str = ".", members: Any = None, *, numeric_owner: bool = False) -> None:
        raise AssertionError("extractall without a filter is unsafe")

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)


@pytest.fixture
def state(tmp_path: Path, settings: Any) -> Path:
    settings.STATE_DIR, settings.HISTORY_DIR = tmp_path / "state", tmp_path / "state" / "history"
    (tmp_path / "state" / "imports" / "key").mkdir(parents=True)
    (tmp_path / "state" / "imports" / "key" / "0").write_bytes(b"a trace")
    (tmp_path / "state" / "uploads").mkdir()
    (tmp_path / "state" / "uploads" / "key.archive").write_bytes(b"a script")
    return tmp_path / "state"


def make_table(rows: int = 1) -> pa.Table:
    return pa.table({f.name: pa.nulls(rows, f.type) for f in TABLES["steps"]}, schema=TABLES["steps"])


def write_history(state: Path, job: str, commits: int = 2) -> HistoryFolder:
    folder = HistoryFolder(state / "history", job, 1)
    manifest = folder.open_for_writing()
    for _ in range(commits):
        folder.commit(manifest, {"steps": make_table()}, {"steps": commits})
    return folder


@pytest.fixture
def filled_board(state: Path, each_database: str, staff: User, owner: User, make_host: Callable[..., Host]) -> Job:
    """Create a running job, users with rights, a token, a host, a lease, and a history."""
    job, _ = actions.submit(owner, GOOD)
    AuthToken.objects.create(owner)
    Attempt.objects.create(job=job, number=1)
    Job.objects.filter(id=job.id).update(attempt=1, status="running")
    make_host()
    Lease.objects.create(name="controller", holder="", beats=7, ticked=timezone.now())
    write_history(state, job.id)
    return job


def read_rows(path: Path) -> list[Any]:
    with tarfile.open(path) as tar, closing(tar.extractfile(backup.ROWS)) as file:  # type: ignore[type-var]
        return [json.loads(line) for line in gzip.decompress(file.read()).splitlines()]  # type: ignore[union-attr]


def delete_everything(state: Path) -> None:
    call_command("flush", interactive=False, verbosity=0)
    for path in sorted(state.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_restores_rows_and_files(filled_board: Job, staff: User, state: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.tar", tmp_path / "second.tar"
    summary = backup.backup(first)
    assert first.stat().st_mode & 0o077 == 0
    rights = staff.get_all_permissions()
    delete_everything(state)
    call_command("restore", str(first))
    backup.backup(second)
    assert read_rows(second) == read_rows(first)
    assert len(read_rows(first)) == sum(summary["rows"].values()) > 8
    assert User.objects.get(username="staff").get_all_permissions() == rights
    folder = HistoryFolder(state / "history", filled_board.id, 1)
    manifest = folder.read_manifest()
    assert (manifest["generation"], folder.read_state(manifest)) == (2, {"steps": 2})
    assert all(Path(file).stat().st_size for file in folder.get_paths(manifest, "steps"))
    assert (state / "imports" / "key" / "0").read_bytes() == b"a trace"
    assert (state / "uploads" / "key.archive").read_bytes() == b"a script"
    another, _ = actions.submit(User.objects.get(username="owner"), GOOD)
    assert another.id != filled_board.id, "new ids continue after the restored ids"


def test_restores_a_row_of_every_table(each_database: str, state: Path, tmp_path: Path) -> None:
    """Restored rows trigger no signals, for example no audit entries."""
    assert fill_tables() == [], "these models have no sample row"
    summary = backup.backup(tmp_path / "first.tar")
    assert [name for name, count in summary["rows"].items() if not count] == []
    delete_everything(state)
    backup.restore(tmp_path / "first.tar")
    backup.backup(tmp_path / "second.tar")
    assert read_rows(tmp_path / "second.tar") == read_rows(tmp_path / "first.tar")


def test_signal_receivers_accept_raw() -> None:
    receivers = [receiver for signal in (pre_save, post_save) for _, receiver, *_ in signal.receivers]
    own = [found for receiver in receivers if (found := receiver()).__module__.startswith(("jobs.", "webapp."))]
    assert len(own) >= 3
    assert [f"{one.__module__}.{one.__name__}" for one in own if "raw" not in signature(one).parameters] == []


def test_restores_a_sqlite_backup_to_postgresql(
    transactional_db: None, postgres_url: str, state: Path, owner: User, tmp_path: Path
) -> None:
    job, _ = actions.submit(owner, GOOD)
    fill_tables()
    backup.backup(tmp_path / "lite.tar")
    with use_database(postgres_url):
        backup.restore(tmp_path / "lite.tar")
        assert Job.objects.get(id=job.id).spec == job.spec
        backup.backup(tmp_path / "postgres.tar")
        actions.submit(User.objects.get(username="owner"), GOOD)
    assert read_rows(tmp_path / "postgres.tar") == read_rows(tmp_path / "lite.tar")


@pytest.mark.parametrize(
    "snapshot", extend_after(1, [True, False]), ids=["snapshot", "without a snapshot the rows differ"]
)
def test_backup_is_a_snapshot_and_does_not_block_writers(
    filled_board: Job, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    """A writer changes three tables in one transaction, between any two tables of the backup."""
    event, stop = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with transaction.atomic():
                Job.objects.filter(id=filled_board.id).update(priority=number % 100)
                Host.objects.update(slots=number % 100)
                User.objects.update(last_name=str(number % 100))
            event.set()
        connection.close()

    serialize = serializers.serialize

    def serialize_and_wait(*arguments: Any, **options: Any) -> Any:
        result = serialize(*arguments, **options)
        event.clear()
        assert event.wait(scale_timeout(15)), "the backup does not block the writer"
        event.clear()
        assert event.wait(scale_timeout(15))
        return result

    monkeypatch.setattr(backup.serializers, "serialize", serialize_and_wait)
    if not snapshot:
        monkeypatch.setattr(backup, "_read_snapshot", nullcontext)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert event.wait(scale_timeout(15))
        backup.backup(tmp_path / "made.tar")
    finally:
        stop.set()
        writer.join()
    rows = {row["model"]: row["fields"] for row in read_rows(tmp_path / "made.tar")}
    numbers = {str(rows["jobs.job"]["priority"]), str(rows["jobs.host"]["slots"]), rows["auth.user"]["last_name"]}
    assert (len(numbers) == 1) is snapshot, numbers


def test_backup_of_a_growing_history_is_complete(
    transactional_db: None, state: Path, owner: User, tmp_path: Path
) -> None:
    job, _ = actions.submit(owner, GOOD)
    folder = write_history(state, job.id)
    stop = threading.Event()

    def write() -> None:
        manifest = folder.read_manifest()
        while not stop.is_set():
            folder.commit(manifest, {"steps": make_table()}, {})
            folder.compact(manifest)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            backup.backup(tmp_path / f"{number}.tar")
    finally:
        stop.set()
        writer.join()
    for number in range(5):
        with tarfile.open(tmp_path / f"{number}.tar") as tar:
            names = set(tar.getnames())
            top = f"history/{job.id}/1"
            manifest = json.load(tar.extractfile(f"{top}/meta.json"))  # type: ignore[arg-type]
        parts = {part["file"] for part in manifest["parts"]["steps"]} | {manifest["state"]}
        assert {f"{top}/{name}" for name in parts} <= names


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any]], None], **more: bytes) -> Path:
    """Copy a backup with changed metadata and additional members."""
    with tarfile.open(source) as before, tarfile.open(target, "w") as after:
        for member in before.getmembers():
            content = before.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == backup.META:
                meta = json.loads(content)
                change(meta)
                content = json.dumps(meta).encode()
            _add(after, member.name, content)
        for name, content in more.items():
            _add(after, name.replace("UP", "../"), content)
    return target


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def saved(transactional_db: None, state: Path, owner: User, tmp_path: Path) -> Iterator[Path]:
    """Yield a backup, and check that the test does not change the board."""
    actions.submit(owner, GOOD)
    backup.backup(tmp_path / "saved.tar")
    before = (Job.objects.count(), User.objects.count(), sorted(state.rglob("*")))
    yield tmp_path / "saved.tar"
    assert (Job.objects.count(), User.objects.count(), sorted(state.rglob("*"))) == before
    assert not list(tmp_path.glob(".restore-*"))


def test_rejects_restore_to_a_board_with_data(saved: Path) -> None:
    with pytest.raises(
        CommandError, match=r"not empty \(1 users, 1 jobs\)\. To delete the data of this board, use --replace"
    ):
        call_command("restore", str(saved))


def test_rejects_restore_while_a_controller_runs(saved: Path) -> None:
    Lease.objects.create(name="controller", holder="somebody", beats=1, ticked=timezone.now())
    with pytest.raises(CommandError, match=r"A controller is running on this board\. Stop the web server"):
        call_command("restore", str(saved), replace=True)


def test_rejects_incomplete_and_incompatible_backups(saved: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.tar"
    half.write_bytes(saved.read_bytes()[:5000])
    older = rewrite(saved, tmp_path / "older.tar", lambda meta: meta["migrations"].append("jobs.0001_initial"))
    newer = rewrite(saved, tmp_path / "newer.tar", lambda meta: meta.update(v=2))
    fewer = rewrite(saved, tmp_path / "fewer.tar", lambda meta: meta["rows"].update({"jobs.Job": 2}))
    slip = rewrite(saved, tmp_path / "slip.tar", lambda meta: None, UPUPevil=b"x")
    for path, message in (
        (tmp_path / "none.tar", "^[^\\[]*none.tar does not exist.$"),
        (half, "is not a complete backup"),
        (older, "The backup is from another version of Meshboard"),
        (newer, "has backup format 2. This version of Meshboard reads format 1"),
        (fewer, "The restored rows differ from the backup"),
        (slip, "is not a complete backup: .*does not belong in a backup"),
    ):
        with pytest.raises(CommandError, match=message):
            call_command("restore", str(path), replace=True)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        (backup.META, b"[]", "is not a complete backup"),
        (backup.META, b'{"v": 1}', "is not a complete backup: .*migrations"),
        (backup.META, b'{"v": 1, "rows": 1e999}', "is not a complete backup"),
        (backup.ROWS, b"not packed", "Cannot read the database rows in the backup: .*gzip"),
        (backup.ROWS, gzip.compress(b"rows")[:-9], "Cannot read the database rows in the backup"),
        (backup.ROWS, gzip.compress(b"{nonsense"), "Cannot read the database rows in the backup"),
        (backup.ROWS, gzip.compress(b"\xff\xfe"), "Cannot read the database rows in the backup"),
        (
            backup.ROWS,
            gzip.compress(b'{"model": "jobs.nowhere", "pk": 1, "fields": {}}'),
            "Cannot read the database rows in the backup: .*jobs.nowhere",
        ),
        (
            backup.ROWS,
            gzip.compress(b'{"model": "jobs.attempt", "pk": 1, "fields": {"job": "gone"}}'),
            "Cannot read the database rows in the backup",
        ),
        (
            backup.ROWS,
            gzip.compress(b'{"model": "jobs.attempt", "pk": "x", "fields": {"number": []}}'),
            "Cannot read the database rows in the backup",
        ),
    ],
    ids=[
        *("no object", "hardly any", "no number", "not packed", "cut off", "no JSON"),
        *("no text", "no such table", "of no job", "no such values"),
    ],
)
def test_rejects_a_changed_backup(saved: Path, tmp_path: Path, member: str, content: bytes, message: str) -> None:
    changed = rewrite(saved, tmp_path / "changed.tar", lambda meta: None, **{member: content})
    with pytest.raises(CommandError, match=message):
        call_command("restore", str(changed), replace=True)


def test_reports_another_key_and_moves_old_files(
    saved: Path, state: Path, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.SECRET_KEY = "another-key-0123456789-0123456789-0123456789-0123456789"
    call_command("restore", str(saved), replace=True)
    output = capsys.readouterr().out
    assert "The secret key differs from the key of the backup." in output
    [moved] = state.glob("imports-before-*")
    assert (moved / "key" / "0").read_bytes() == (state / "imports" / "key" / "0").read_bytes() == b"a trace"
    [moved_uploads] = state.glob("uploads-before-*")
    assert (moved_uploads / "key.archive").read_bytes() == b"a script"
    for folder in (moved, moved_uploads):
        shutil.rmtree(folder)


def test_restored_database_is_private(saved: Path, tmp_path: Path) -> None:
    """The database contains hashes, so only its owner can read it. Restore creates its folder."""
    environment = {
        **base_environment(),
        "MESHBOARD_SECRET_KEY": settings.SECRET_KEY,
        "MESHBOARD_REDIS_URL": "redis://127.0.0.1:1/0",
        "MESHBOARD_STATE_DIR": str(tmp_path / "new" / "state"),
        "MESHBOARD_HTTPS": "0",
    }
    argv = [sys.executable, "manage.py", "restore", str(saved)]
    subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, check=True)
    database = tmp_path / "new" / "state" / "db.sqlite3"
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


def test_backup_does_not_overwrite_a_file(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="already exists"):
        call_command("backup", str(saved))
    with pytest.raises(
        CommandError, match=re.escape(f"{tmp_path}/none is not a folder. Use an existing folder.") + "$"
    ):
        call_command("backup", str(tmp_path / "none" / "saved.tar"))
    with pytest.raises(CommandError, match=r"^Cannot create a file in /proc: .*. Use another folder.$"):
        call_command("backup", "/proc/board.tar")
    (tmp_path / "folder").mkdir()
    call_command("backup", str(tmp_path / "folder"))
    [archive] = (tmp_path / "folder").iterdir()
    assert archive.suffix == ".tar"
    assert read_rows(archive) == read_rows(saved)
