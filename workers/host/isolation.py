"""Isolation of jobs from the host and from each other: the job's user, and its bubblewrap sandbox.

In bubblewrap a job sees the machine read-only. Hidden behind empty folders are the state of web and host processes,
/run, /tmp, the home folder, and every folder that other users cannot pass. Python, Meshboard's code, and the job's own
folders are mounted again. The job writes only to its own folders. Processes are the job's own, GPU devices are the
host's. The network is the host's too, except for a job whose ranks contact only each other: it gets a private loopback,
where no other job reaches its rendezvous store or the ports of gloo and NCCL.

`python -m workers.host.isolation` prints the isolation that works here, or the setting that does not work.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import NamedTuple

from contracts.control import LaunchOrder, LendOrder
from workers.host.settings import (
    DEFAULT_JOB_USER,
    MAX_OWNERS,
    USER_PER_OWNER,
    HostSettingError,
    HostSettings,
    JobUser,
    Sandbox,
    read_host_settings,
)

log = logging.getLogger(__name__)

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# The guardian needs them to kill processes of another user, and to become that user in the user's folder.
CAPABILITIES = ("CAP_KILL", "CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
OWN_NETWORK = ("--unshare-net",)
NETWORK_TRIAL_TIMEOUT_S = 10
NAME_SERVICES = Path("/etc/nsswitch.conf")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108  # private to each job
DEVICES = ("/dev/nvidia*", "/dev/infiniband", "/dev/gdrdrv")
TRIAL_TIMEOUT_S = 60
# Runs as a job would run. Prints the first path or package that the job cannot reach.
TRIAL_SCRIPT = """
import importlib.util, os, sys
written, *read = sys.argv[1:]
blocked = [path for path in read if os.path.lexists(path) and not os.access(path, os.R_OK)]
blocked += [name for name in ("torch", "workers.host.launch") if importlib.util.find_spec(name) is None]
open(os.path.join(written, "tried"), "w").close()
print(*blocked[:1])
"""


class Mounts(NamedTuple):
    """Paths by how a job sees them, without missing paths. `temporary` is the job's /tmp."""

    temporary: Path
    hidden: set[Path]
    read: set[Path]
    written: set[Path]


def choose_isolation(settings: HostSettings) -> tuple[HostSettings, str]:
    """Replace `auto` by the best isolation that works on this machine.

    Returns:
        The settings, and a note for the host's page, which is empty if the isolation is complete.

    Raises:
        HostSettingError: an isolation that was set by name does not work, jobs would run as root, or the run directory
            cannot be created.
    """
    try:
        settings.run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise HostSettingError(
            f"MESHBOARD_RUN_DIR is {settings.run_dir}, which cannot be created: {error.strerror}"
        ) from None
    problems: dict[Sandbox, str] = {}  # the last one per sandbox
    for sandbox, user in _list_candidates(settings):
        problem = "" if (sandbox, user) == ("off", None) else _try_isolation(settings, sandbox, user)
        if problem:
            problems[sandbox] = problem
            continue
        chosen = replace(settings, job_user=user, choose_user=False, sandbox=sandbox)
        reasons = list(problems.values())
        if user is None and os.geteuid() == 0 and not settings.allow_root_jobs:
            chosen_by_name = [] if settings.choose_user else ["MESHBOARD_JOB_USER is none"]
            raise HostSettingError(_explain_root_jobs([*chosen_by_name, *reasons]))
        if sandbox == "bwrap" and not can_unshare_network():
            reasons.append(
                "jobs share the loopback network of this machine, because bubblewrap cannot create a network"
            )
        note = f"{_describe(chosen)}: {'; '.join(dict.fromkeys(reasons))}"[:1000] if reasons else ""
        if note:
            log.warning("%s", note)
        return chosen, note
    raise HostSettingError("; ".join(dict.fromkeys(problems.values())))


def _explain_root_jobs(reasons: list[str]) -> str:
    """Return the reason for the refusal to start, with the possible fixes."""
    why = "; ".join(dict.fromkeys(reasons))
    return (
        f"Jobs would run as root ({why}). Install bubblewrap, or use a Python and a checkout of Meshboard that other "
        "users can read, or start Meshboard as another user than root. If only you submit jobs, you can set "
        "MESHBOARD_ALLOW_ROOT_JOBS=1."
    )


def get_isolation_variables(settings: HostSettings) -> dict[str, str]:
    """Return the chosen isolation as environment variables of a supervisor."""
    user = settings.job_user
    name = "none" if user is None else "owners" if user == USER_PER_OWNER else user.name
    if user is not None and user != USER_PER_OWNER and user.name == DEFAULT_JOB_USER.name:
        name = f"{user.uid}:{user.gid}"
    return {"MESHBOARD_JOB_USER": name, "MESHBOARD_SANDBOX": settings.sandbox}


def get_job_user(order: LaunchOrder | LendOrder, settings: HostSettings) -> JobUser | None:
    """Return the user of an order's processes. With USER_PER_OWNER, each owner has a separate user."""
    if settings.job_user != USER_PER_OWNER:
        return settings.job_user
    uid = USER_PER_OWNER.uid + order.get("owner", 0) % MAX_OWNERS
    # The group can write to a shared folder. In bubblewrap, only the script's own folder is writable.
    return USER_PER_OWNER._replace(uid=uid, gid=USER_PER_OWNER.gid if settings.sandbox == "bwrap" else uid)


def build_user_prefix(user: JobUser | None, *, sandboxed: bool) -> list[str]:
    """Return the start of a command that runs the rest as `user`, without the capabilities of the guardian.

    Empty if nothing changes.
    """
    drop = ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"]
    if user is not None:
        groups = "--clear-groups" if user.name == DEFAULT_JOB_USER.name else "--init-groups"
        return ["setpriv", "--reuid", str(user.uid), "--regid", str(user.gid), groups, *drop]
    return ["setpriv", *drop] if sandboxed and os.geteuid() == 0 else []


def make_owned_folder(folder: Path, user: JobUser | None) -> None:
    """Create a folder that belongs to the job's user."""
    folder.mkdir(parents=True, exist_ok=True)
    if user is not None:
        os.chown(folder, user.uid, user.gid)


def share_folder(folder: Path, root: Path, user: JobUser | None) -> None:
    """Let the user's group create files in a folder, without changing the files of its owner.

    A folder that was moved outside `root` after the check is not changed, because another job can write to `root`.
    """
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


def get_python_paths() -> set[Path]:
    """Return the paths of Python and of Meshboard's code."""
    paths = {Path(sys.executable), Path(sys.prefix), Path(sys.base_prefix), PACKAGE_ROOT}
    paths |= {Path(entry) for entry in sys.path if entry.startswith("/")}
    home = Path(os.path.expanduser("~")).resolve()  # in sys.path if the process was started there
    return {path for path in paths if not home.is_relative_to(path.resolve())}


def plan_mounts(settings: HostSettings, read: Iterable[Path], written: Iterable[Path], temporary: Path) -> Mounts:
    """Classify the paths of a job. `read` and `written` are the paths it needs in addition to Python."""
    states = {settings.state_dir, settings.run_dir, settings.checkpoint_root}
    name_servers = Path("/etc/resolv.conf").resolve()  # often in /run
    readable = {path for path in {*get_python_paths(), *read, name_servers} if path.exists()}
    writable = {path for path in written if path.exists()}
    hidden = {path.resolve() for path in {Path(os.path.expanduser("~")), *states, *TEMPORARY, Path("/run")}}
    hidden |= {folder for path in readable | writable for folder in _find_closed_parents(path)}
    return Mounts(temporary, {path for path in hidden if path.is_dir() and path != Path("/")}, readable, writable)


def can_unshare_network() -> bool:
    """Return whether bubblewrap can create a network here. In a container it can lack the permission."""
    command = ["bwrap", *OWN_NETWORK, "--ro-bind", "/", "/", "--", "true"]
    try:
        trial = subprocess.run(command, capture_output=True, timeout=NETWORK_TRIAL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return trial.returncode == 0


def build_sandbox_prefix(
    settings: HostSettings,
    read: Iterable[Path],
    written: Iterable[Path],
    temporary: Path,
    cwd: Path,
    *,
    private_network: Path | None = None,
) -> list[str]:
    """Return the start of a command that runs the rest in bubblewrap, as PID 1 of a new namespace.

    Args:
        private_network: a host folder for the network's settings, if the job gets its own loopback and no network.
    """
    options = [*OWN_NETWORK] if private_network else []
    options += ["--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent"]
    options += ["--ro-bind", "/", "/", "--proc", "/proc"]
    options += _use_files_for_names(private_network) if private_network else []
    if os.geteuid() == 0:
        options += ["--cap-drop", "ALL"]
        options += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    options += ["--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108
    options += [word for pattern in DEVICES for path in sorted(glob(pattern)) for word in ("--dev-bind", path, path)]
    mounts = plan_mounts(settings, read, written, temporary)
    return ["bwrap", *options, *_build_mount_options(mounts), "--chdir", str(cwd), "--"]


def _use_files_for_names(folder: Path) -> list[str]:
    """Return options that limit name lookup to files.

    Without a name server, an unknown name is a temporary error, and torch warns about it in the log of each rank.
    """
    if not NAME_SERVICES.is_file():
        return []
    copy = folder / NAME_SERVICES.name
    copy.write_text(re.sub(r"^hosts:.*$", "hosts: files", NAME_SERVICES.read_text(), flags=re.MULTILINE))
    return ["--ro-bind", str(copy), str(NAME_SERVICES.resolve())]


def _build_mount_options(mounts: Mounts) -> list[str]:
    """Return bubblewrap's options. A folder comes after its parents, because later mounts cover earlier ones."""
    links = {link for path in mounts.read | mounts.written for link in _find_links(path)}
    read, written = ({path.resolve() for path in paths} for paths in (mounts.read, mounts.written))
    options: list[str] = []
    covered: dict[Path, bool] = {}  # True for an empty folder
    for path in sorted(mounts.hidden | read | written | links):
        parent = next((folder for folder in path.parents if folder in covered), None)
        in_empty = parent is not None and covered[parent]
        if parent is not None and in_empty:
            between = [folder for folder in path.parents if folder.is_relative_to(parent) and folder != parent]
            for folder in reversed(between):
                options += ["--perms", "0755", "--dir", str(folder)]
        if path in links:
            options += ["--symlink", os.readlink(path), str(path)] if in_empty else []
            continue
        if path in mounts.hidden:
            empty = ["--bind", str(mounts.temporary)] if path in TEMPORARY else ["--perms", "0755", "--tmpfs"]
            options += [*empty, str(path)]
            covered[path] = True
        if path in read | written and (path in written or path in mounts.hidden or in_empty):
            options += ["--bind" if path in written else "--ro-bind", str(path), str(path)]
            covered[path] = False
    closed = [str(path) for path, is_empty in covered.items() if is_empty and path not in TEMPORARY]
    return options + [word for path in closed for word in ("--remount-ro", path)]


def _find_links(path: Path) -> Iterator[Path]:
    """Yield the symbolic links on the way to a path, each with the real path of its folder."""
    for part in [*reversed(path.parents), path]:
        if part.is_symlink():
            link = part.parent.resolve() / part.name
            yield link
            yield from _find_links(link.parent / os.readlink(link))


def _find_closed_parents(path: Path) -> Iterator[Path]:
    """Yield the parent folders that other users cannot pass."""
    for folder in path.resolve().parents:
        if not folder.stat().st_mode & 0o001:
            yield folder


def _list_candidates(settings: HostSettings) -> list[tuple[Sandbox, JobUser | None]]:
    """Return the isolations that the settings allow, best first."""
    sandboxes: list[Sandbox] = ["bwrap", "off"] if settings.sandbox == "auto" else [settings.sandbox]
    users = [USER_PER_OWNER, DEFAULT_JOB_USER, None] if settings.choose_user else [settings.job_user]
    return [(sandbox, user) for sandbox in sandboxes for user in users]


def _try_isolation(settings: HostSettings, sandbox: Sandbox, user: JobUser | None) -> str:
    """Start a Python process as a job would start. Return the problem, which is empty on success."""
    setting = "MESHBOARD_SANDBOX: bubblewrap" if sandbox == "bwrap" else "MESHBOARD_JOB_USER"
    if sandbox == "bwrap" and shutil.which("bwrap") is None:
        return f"{setting} is not installed"
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=settings.run_dir) as name:
        folder = Path(name)
        folder.chmod(0o700)
        make_owned_folder(folder, user)
        prefix = build_sandbox_prefix(settings, [], [folder], folder, folder) if sandbox == "bwrap" else []
        prefix += build_user_prefix(user, sandboxed=sandbox == "bwrap")
        needed = [str(folder), *map(str, sorted(get_python_paths()))]
        command = [*prefix, sys.executable, "-c", TRIAL_SCRIPT, *needed]
        env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PACKAGE_ROOT), "HOME": name}
        try:
            result = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{setting} does not work: {error}"
    blocked = result.stdout.strip()
    if result.returncode == 0 and not blocked:
        return ""
    who = "" if user is None else f"uid {user.uid} "
    if result.returncode == 0:
        return f"{setting}: {who}cannot reach {blocked}"
    last_line = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return f"{setting}: {who}cannot start {sys.executable}: {last_line[:300]}"


def _describe(settings: HostSettings) -> str:
    user, worker = settings.job_user, "root" if os.geteuid() == 0 else f"the host worker, uid {os.geteuid()}"
    who = worker if user is None else "one user per owner" if user == USER_PER_OWNER else f"uid {user.uid}"
    return f"jobs run as {who}, {'in' if settings.sandbox == 'bwrap' else 'without'} bubblewrap"


def main() -> int:
    try:
        settings, note = choose_isolation(read_host_settings(joined=False))
    except HostSettingError as error:
        print(error, file=sys.stderr)
        return 1
    print(note or _describe(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
