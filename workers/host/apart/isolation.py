"""How well this host keeps jobs apart: the best that works here, found by trying it.

`python -m workers.host.apart.isolation` tells, or says on stderr why a setting cannot be kept.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from workers.host.apart.identity import as_user
from workers.host.apart.lending import give
from workers.host.apart.sandbox import PACKAGES, has_own_network, of_python, sandbox_prefix
from workers.host.settings import CHOSEN_USER, OWNERS, HostSettings, JobUser, Sandbox, SettingError, host_settings

log = logging.getLogger(__name__)

TRIAL_S = 60
# Run as the job would be: the first path that cannot be reached, or nothing.
TRIAL = """
import importlib.util, os, sys
written, *read = sys.argv[1:]
blocked = [path for path in read if os.path.lexists(path) and not os.access(path, os.R_OK)]
blocked += [name for name in ("torch", "workers.host.start.launch") if importlib.util.find_spec(name) is None]
open(os.path.join(written, "tried"), "w").close()
print(*blocked[:1])
"""


def isolated(settings: HostSettings) -> tuple[HostSettings, str]:
    """The settings with what is chosen for `auto`, and what a person should know of it: empty when it is the best.

    Raises:
        SettingError: what was asked for by name does not work here, or there is no place to try it in.
    """
    try:
        settings.run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"MESHBOARD_RUN_DIR is {settings.run_dir}, which cannot be created: {error.strerror}"
        ) from None
    problems: dict[Sandbox, str] = {}  # of a user who is tried after another, the last
    for sandbox, user in _wanted(settings):
        problem = "" if (sandbox, user) == ("off", None) else _trial(settings, sandbox, user)
        if not problem:
            chosen = replace(settings, job_user=user, choose_user=False, sandbox=sandbox)
            told = _told(chosen, [*problems.values(), *_shared(chosen)])
            if told:
                log.warning("%s", told)
            return chosen, told
        problems[sandbox] = problem
    raise SettingError("; ".join(dict.fromkeys(problems.values())))


def as_environment(settings: HostSettings) -> dict[str, str]:
    """What was chosen, as settings of a supervisor."""
    user = settings.job_user
    name = "none" if user is None else "owners" if user == OWNERS else user.name
    if user is not None and user != OWNERS and user.name == CHOSEN_USER.name:
        name = f"{user.uid}:{user.gid}"
    return {"MESHBOARD_JOB_USER": name, "MESHBOARD_SANDBOX": settings.sandbox}


def _wanted(settings: HostSettings) -> list[tuple[Sandbox, JobUser | None]]:
    """What may be chosen, the best first."""
    sandboxes: list[Sandbox] = ["bwrap", "off"] if settings.sandbox == "auto" else [settings.sandbox]
    users = [OWNERS, CHOSEN_USER, None] if settings.choose_user else [settings.job_user]
    return [(sandbox, user) for sandbox in sandboxes for user in users]


def _trial(settings: HostSettings, sandbox: Sandbox, user: JobUser | None) -> str:
    """Start a Python as a job's would be. Why that fails, in words that name what fails."""
    what = "MESHBOARD_SANDBOX: bubblewrap" if sandbox == "bwrap" else "MESHBOARD_JOB_USER"
    if sandbox == "bwrap" and shutil.which("bwrap") is None:
        return f"{what} is not installed"
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=settings.run_dir) as name:
        folder = Path(name)
        folder.chmod(0o700)
        give(folder, user)
        prefix = sandbox_prefix(settings, [], [folder], folder, folder) if sandbox == "bwrap" else []
        as_them = as_user(user, sandboxed=sandbox == "bwrap")
        needed = [str(folder), *map(str, sorted(of_python()))]
        command = [*prefix, *as_them, sys.executable, "-c", TRIAL, *needed]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PACKAGES), "HOME": name}
        try:
            ran = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TRIAL_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{what} does not work: {error}"
    if ran.returncode == 0 and not ran.stdout.strip():
        return ""
    who = "" if user is None else f"uid {user.uid} "
    if ran.returncode == 0:
        return f"{what}: {who}cannot reach {ran.stdout.strip()}"
    last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    return f"{what}: {who}cannot start {sys.executable}: {last[:300]}"


def _told(settings: HostSettings, problems: list[str]) -> str:
    """One sentence for the page, where less was chosen than there is."""
    if not problems:
        return ""
    return f"{_words(settings)}: {'; '.join(dict.fromkeys(problems))}"[:1000]


def _shared(settings: HostSettings) -> list[str]:
    """What jobs share though they run in bubblewrap."""
    if settings.sandbox != "bwrap" or has_own_network():
        return []
    return ["jobs share the loopback network of this machine, because bubblewrap cannot create a network"]


def _words(settings: HostSettings) -> str:
    user, ourselves = settings.job_user, "root" if os.geteuid() == 0 else f"the host worker, uid {os.geteuid()}"
    who = ourselves if user is None else "one user per owner" if user == OWNERS else f"uid {user.uid}"
    return f"jobs run as {who}, {'in' if settings.sandbox == 'bwrap' else 'without'} bubblewrap"


def main() -> int:
    try:
        settings, note = isolated(host_settings(joined=False))
    except SettingError as error:
        print(error, file=sys.stderr)
        return 1
    print(note or _words(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
