"""Removal of trees that a job can create."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.disk import TreeWalk, remove_path


def make_nested(root: Path, depth: int, name: str = "d") -> None:
    """Create nested folders with one file in the deepest folder. The path may be too long for one call."""
    root.mkdir(parents=True)
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=descriptor)
        child = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)


@contextmanager
def limit_open_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("depth", "name"), [(1500, "d"), (400, "n" * 200)])
def test_removes_deep_trees_with_few_open_files(memory_path: Path, depth: int, name: str) -> None:
    root = memory_path / "tree"
    make_nested(root, depth, name)
    (root / "beside").mkdir()
    descriptors = set(os.listdir("/proc/self/fd"))
    with limit_open_files(len(descriptors) + 60):
        remove_path(root)
    assert not root.exists()
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_removes_links_and_special_files_without_following(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    (outside / "file").write_text("stays")
    (root / "inner").mkdir(parents=True)
    (root / "folder-link").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to("/nowhere")
    os.mkfifo(root / "inner" / "fifo")
    os.mkdir(os.fsencode(root / "inner") + b"/\xff\xfe")
    remove_path(root)
    link = tmp_path / "link"
    link.symlink_to(outside)
    remove_path(link)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "file").read_text() == "stays"


REMOVE_AS_USER = """
import os, sys
from pathlib import Path
os.setuid(12345)
root = Path(sys.argv[1])
for mode in (0o000, 0o400, 0o100, 0o500):
    folder = root / "tree" / oct(mode)
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("")
    (folder / "inner").chmod(mode)
    folder.chmod(mode)
(root / "tree").chmod(0)
from workers.disk import remove_path
remove_path(root / "tree")
assert not (root / "tree").exists()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a check as another user")
def test_removes_own_folders_without_permissions(tmp_path: Path) -> None:
    """Root ignores permissions, so another user creates and removes the folders."""
    code = f"import sys; sys.path.insert(0, {os.getcwd()!r}); import workers.disk\n{REMOVE_AS_USER}"
    folder = Path("/tmp") / f"meshboard-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    try:
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
    finally:
        remove_path(folder)


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", path], capture_output=True).returncode != 0:
        pytest.skip("this file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def test_removes_all_but_an_immutable_file_and_names_it(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("")
    with immutable(root / "b" / "file"):
        with pytest.raises(OSError, match="tree/b/file") as caught:
            remove_path(root)
        assert caught.value.errno == errno.EPERM
        assert [path.name for path in root.rglob("*")] == ["b", "file"]
    remove_path(root)
    assert not root.exists()


def test_a_folder_moved_during_the_walk_ends_the_walk(tmp_path: Path) -> None:
    """A job's process must not lead the walk out of its tree."""
    root, outside = tmp_path / "tree", tmp_path / "outside"
    make_nested(root, 60)
    outside.mkdir()
    walk = iter(TreeWalk(root))
    parent, name, _ = next(walk)
    assert name == "file"
    Path(os.readlink(f"/proc/self/fd/{parent}")).parent.rename(outside / "d")
    with pytest.raises(OSError, match="moved a folder"):
        list(walk)
