"""Folders that a job's user may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from workers.host.settings import JobUser


def give(folder: Path, user: JobUser | None) -> None:
    """Make it, and make it the user's."""
    folder.mkdir(parents=True, exist_ok=True)
    if user is not None:
        os.chown(folder, user.uid, user.gid)


def lend(folder: Path, root: Path, user: JobUser | None) -> None:
    """Let the user's group make files in it; what its owner has there stays its owner's. Nothing where it was put
    outside `root` since it was looked at: another job may write there too."""
    if user is None:
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(root):
            os.fchown(descriptor, -1, user.gid)
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.fchmod(descriptor, mode | stat.S_IRWXG | stat.S_ISGID | stat.S_ISVTX)
    finally:
        os.close(descriptor)
