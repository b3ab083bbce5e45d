"""What runs left in the cluster's folder goes after a week: no worker of ours stays there to do it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

KEPT_S = 7 * 86400.0


def prune(folder: Path) -> None:
    """Folders of attempts and outputs of batch jobs in which nobody has written for `KEPT_S`; checkpoints stay."""
    oldest = time.time() - KEPT_S
    for path in [*(folder / "runs").glob("*"), *(folder / "slurm").glob("meshboard-*.out")]:
        try:
            if any(one.lstat().st_mtime > oldest for one in (path, *path.rglob("*"))):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        except OSError:
            continue  # another node was here first
