"""Packing of scripts for an upload: ignored files, limits, and equal archives of equal files."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts import archives
from meshboard import client as client_module
from meshboard import packing
from meshboard.commands.app import ExitCode
from meshboard.errors import WrongError
from meshboard.packing import pack
from tests.client.conftest import FakeServer, Ran
from tests.client.test_api import JOB

Meshboard = Callable[..., Ran]


def write(top: Path, *names: str) -> None:
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)


def test_packs_a_folder_without_ignored_files(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "pkg/model.py", "pkg/x.log", "keep.log", "out/a.pt", "pkg/out/b.pt", "deep/secret.txt")
    write(tmp_path, ".git/config", "pkg/__pycache__/model.pyc", ".venv/bin/python", "data/train.bin", "deep/a/data/b")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/out/\n# a comment\n")
    (tmp_path / ".meshboardignore").write_text("data/\n")
    (tmp_path / "deep" / ".gitignore").write_text("/secret.txt\n")
    packed = pack(str(tmp_path))
    assert [name for name, _ in packed.files] == [
        *(".gitignore", ".meshboardignore", "deep/.gitignore", "keep.log", "pkg/model.py", "pkg/out/b.pt", "train.py"),
    ]
    assert packed.name == f"{tmp_path.name}.tar.gz"
    summary = archives.check_archive(io.BytesIO(packed.content))
    assert list(summary.paths) == [name for name, _ in packed.files]


def test_equal_files_have_an_equal_archive(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, "train.py", "pkg/model.py")
    os.utime(tmp_path / "b" / "train.py", (1, 1))
    (tmp_path / "b" / "train.py").chmod(0o600)
    assert pack(str(tmp_path / "a")).content == pack(str(tmp_path / "b")).content
    (tmp_path / "b" / "train.py").write_text("changed")
    assert pack(str(tmp_path / "a")).content != pack(str(tmp_path / "b")).content


def test_packs_a_single_script(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    packed = pack(str(tmp_path / "train.py"))
    assert (packed.name, packed.files) == ("train.py.tar.gz", [("train.py", 8)])


def run_git(top: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", str(top), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_packs_a_commit_of_a_repository(tmp_path: Path) -> None:
    top = tmp_path / "nano.git"
    write(top, "train.py")
    run_git(top, "init", "--quiet", "--initial-branch=main")
    commits = []
    for content in ("first", "second"):
        (top / "train.py").write_text(content)
        run_git(top, "add", ".")
        run_git(top, "commit", "--quiet", "--message", content)
        commits.append(run_git(top, "rev-parse", "HEAD"))
    run_git(top, "tag", "v1", commits[0])
    for revision, commit in (
        ("", commits[1]),
        ("@v1", commits[0]),
        ("@main", commits[1]),
        (f"@{commits[0][:9]}", commits[0]),
    ):
        packed = pack(f"file://{top}{revision}")
        assert packed.name == f"nano@{commit[:12]}.tar.gz"
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
            script = tar.extractfile("train.py")
            assert script is not None
            assert script.read() == (b"first" if commit == commits[0] else b"second")


@pytest.mark.parametrize("source", ["file:///nowhere/x", "file://{top}@no-such-tag"])
def test_unknown_repository_or_revision_is_refused(tmp_path: Path, source: str) -> None:
    run_git(tmp_path, "init", "--quiet")
    with pytest.raises(WrongError, match="--upload file://"):
        pack(source.format(top=tmp_path))


def test_links_become_files_or_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "top/train.py", "top/data/a.txt", "other.txt")
    for name, target in (("inside.py", "train.py"), ("outside.txt", "../other.txt"), ("folder", "data"), ("gone", "x")):
        (tmp_path / "top" / name).symlink_to(target)
    os.mkfifo(tmp_path / "top" / "pipe")
    packed = pack(str(tmp_path / "top"))
    assert [name for name, _ in packed.files] == ["data/a.txt", "inside.py", "train.py"]
    assert sorted(note.split(" ")[0] for note in packed.notes) == ["folder", "gone", "outside.txt", "pipe"]
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
        assert all(member.isreg() for member in tar)


def test_large_folder_names_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_ARCHIVE_BYTES", 1_000_000)
    write(tmp_path, "train.py")
    (tmp_path / "weights.bin").write_bytes(random.Random(1).randbytes(1_100_000))
    with pytest.raises(WrongError) as error:
        pack(str(tmp_path))
    assert "1.1 MB compressed, and the maximum is 1 MB. The largest files are weights.bin (1.1 MB), " in str(
        error.value
    )
    assert ".meshboardignore" in str(error.value)
    monkeypatch.setattr(packing, "MAX_ENTRIES", 1)
    with pytest.raises(WrongError, match="more than 1 files"):
        pack(str(tmp_path))


@pytest.mark.parametrize("name", ["missing", "empty", "pipe"])
def test_source_without_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WrongError, match="--upload"):
        pack(str(tmp_path / name))


def test_limits_are_those_of_the_board() -> None:
    names = ("MAX_ARCHIVE_BYTES", "MAX_UNPACKED_BYTES", "MAX_ENTRIES")
    assert [getattr(packing, name) for name in names] == [getattr(archives, name) for name in names]


def make_upload(sha256: str, *scripts: str) -> dict[str, object]:
    numbers = {"size": 300, "files": 1, "unpacked_bytes": 8}
    return {"id": "u1", "name": "demo.tar.gz", "sha256": sha256, "scripts": list(scripts), "sent": "today", **numbers}


def test_submit_sends_the_upload_in_parts_and_names_it_in_the_spec(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PART_BYTES", 100)
    write(tmp_path, "train.py")
    content = pack(str(tmp_path)).content
    server.respond_at("uploads", make_upload(""), 201)
    server.respond_at("uploads/u1", {"size": 1})
    server.respond_at("uploads/u1/finish", make_upload("f" * 64, "train.py"))
    server.respond_at("jobs", JOB, 201)
    ran = meshboard("submit", "--upload", str(tmp_path), "--set", "layout.dp=2", at=server)
    assert ran.code == 0, ran.err
    offsets = range(0, len(content), 100)
    assert server.requests == [
        "POST /api/v1/uploads",
        *(f"PUT /api/v1/uploads/u1?offset={offset}" for offset in offsets),
        "POST /api/v1/uploads/u1/finish",
        "POST /api/v1/jobs",
    ]
    assert b"".join(server.bodies[1:-2]) == content
    assert json.loads(server.bodies[-1]) == {
        "layout": {"dp": 2},
        "kind": "script",
        "name": tmp_path.name,
        "script": {"upload": "f" * 64, "path": "train.py"},
    }
    assert "demo.tar.gz: 1 file, 300 B compressed" in ran.err
    assert "  train.py  8 B" in ran.err


def test_submit_sends_known_files_once_and_asks_for_the_script(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path
) -> None:
    write(tmp_path, "a.py", "b.py")
    server.respond_at("uploads", make_upload("f" * 64, "a.py", "b.py"))
    ran = meshboard("submit", "--upload", str(tmp_path), at=server)
    assert (ran.code, server.requests) == (ExitCode.WRONG, ["POST /api/v1/uploads"])
    assert "Use --set script.path=FILE. The Python files of the upload are: a.py, b.py." in ran.err
    assert "Name a file with the job spec" in meshboard("submit", at=server).err
