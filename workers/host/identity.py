"""Who a job's processes are, where they are not who the host worker is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workers.host.settings import HostSettings, JobUser, SettingError

PACKAGES = Path(__file__).resolve().parents[2]
REACHED = "import os, sys; print(*(path for path in sys.argv[1:] if not os.access(path, os.X_OK)))"


def as_user(user: JobUser | None) -> list[str]:
    """The start of a command that runs the rest of it as `user`, for good; empty for ourselves."""
    if user is None:
        return []
    identity = ["--reuid", str(user.uid), "--regid", str(user.gid), "--init-groups"]
    return ["setpriv", *identity, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"]


def check_reach(settings: HostSettings) -> None:
    """Raises SettingError when the jobs' user could not even start: this Python is in somebody's home, say."""
    user = settings.job_user
    if user is None:
        return
    settings.run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    needed = [sys.executable, str(PACKAGES), str(settings.run_dir.parent)]
    command = [*as_user(user), sys.executable, "-I", "-c", REACHED, *needed]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode != 0 or ran.stdout.strip():
        problem = ran.stdout.strip() or ran.stderr.strip()[-300:]
        raise SettingError(f"MESHBOARD_JOB_USER: {user.name} cannot reach {problem}")
