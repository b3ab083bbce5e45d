"""What a job's processes see of this machine in bubblewrap: all of it read-only, but for what is not theirs.

Hidden, each behind an empty folder: the states of web and host, /run, /tmp, our home, and every folder that others
may not pass. What a job needs of these is put back: Python, our code, its own folders. It writes to its own folders
alone. Processes are its own, a GPU's devices are the host's. So is the network, but for a job whose ranks speak to each
other alone: it has a loopback of its own, on which nobody else reaches their store nor what gloo and NCCL listen on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import NamedTuple

from workers.host.settings import HostSettings

PACKAGES = Path(__file__).resolve().parents[3]
# What the guardian needs to end processes of another user, and to become that user in a folder of theirs.
CAPABILITIES = ("CAP_KILL", "CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
OWN_NETWORK = ("--unshare-net",)
TRIAL_S = 10
NAME_SERVICES = Path("/etc/nsswitch.conf")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108  # what a job sees there is its own
DEVICES = ("/dev/nvidia*", "/dev/infiniband", "/dev/gdrdrv")


class Mounts(NamedTuple):
    """Folders and files by how a job sees them. What is not there is left out. `temporary` is its /tmp."""

    temporary: Path
    hidden: set[Path]
    read: set[Path]
    written: set[Path]


def of_python() -> set[Path]:
    """What this Python and our code are read from."""
    found = {Path(sys.executable), Path(sys.prefix), Path(sys.base_prefix), PACKAGES}
    found |= {Path(entry) for entry in sys.path if entry.startswith("/")}
    home = Path(os.path.expanduser("~")).resolve()  # on the path where we were started from it
    return {path for path in found if not home.is_relative_to(path.resolve())}


def mounts(settings: HostSettings, read: Iterable[Path], written: Iterable[Path], temporary: Path) -> Mounts:
    """`read` and `written`: what a job needs beside Python."""
    states = {settings.state_dir, settings.run_dir, settings.checkpoint_root}
    names = Path("/etc/resolv.conf").resolve()  # which often lies in /run
    readable = {path for path in {*of_python(), *read, names} if path.exists()}
    writable = {path for path in written if path.exists()}
    hidden = {path.resolve() for path in {Path(os.path.expanduser("~")), *states, *TEMPORARY, Path("/run")}}
    hidden |= {folder for path in readable | writable for folder in _closed_above(path)}
    return Mounts(temporary, {path for path in hidden if path.is_dir() and path != Path("/")}, readable, writable)


def has_own_network() -> bool:
    """Whether bubblewrap may make a network here, found by trying: in a container it may need a right more."""
    tried = ["bwrap", *OWN_NETWORK, "--ro-bind", "/", "/", "--", "true"]
    try:
        return subprocess.run(tried, capture_output=True, timeout=TRIAL_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def sandbox_prefix(
    settings: HostSettings,
    read: Iterable[Path],
    written: Iterable[Path],
    temporary: Path,
    cwd: Path,
    *,
    alone: Path | None = None,
) -> list[str]:
    """The start of a command that runs the rest of it as PID 1 of its own, in `cwd`. `alone`: with a network of its
    own, which is a loopback and nothing else; a folder of ours for what is said of it."""
    options = [*OWN_NETWORK] if alone else []
    options += ["--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent"]
    options += ["--ro-bind", "/", "/", "--proc", "/proc"]
    options += _known_names(alone) if alone else []
    if os.geteuid() == 0:
        options += ["--cap-drop", "ALL"]
        options += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    options += ["--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108
    options += [word for pattern in DEVICES for path in sorted(glob(pattern)) for word in ("--dev-bind", path, path)]
    return ["bwrap", *options, *_in_order(mounts(settings, read, written, temporary)), "--chdir", str(cwd), "--"]


def _known_names(folder: Path) -> list[str]:
    """Names are looked up in files alone. Where no server can be asked, one that is in none is not "unknown" but to be
    asked for again later, and torch warns of that in each rank's log."""
    if not NAME_SERVICES.is_file():
        return []
    own = folder / NAME_SERVICES.name
    own.write_text(re.sub(r"^hosts:.*$", "hosts: files", NAME_SERVICES.read_text(), flags=re.MULTILINE))
    return ["--ro-bind", str(own), str(NAME_SERVICES.resolve())]


def _in_order(seen: Mounts) -> list[str]:
    """Each folder after those that it lies in: a later one covers."""
    links = {link for path in seen.read | seen.written for link in _links(path)}
    read, written = ({path.resolve() for path in paths} for paths in (seen.read, seen.written))
    options: list[str] = []
    covered: dict[Path, bool] = {}  # True: an empty folder
    for path in sorted(seen.hidden | read | written | links):
        above = next((folder for folder in path.parents if folder in covered), None)
        in_empty = above is not None and covered[above]
        if above is not None and in_empty:
            for folder in reversed(
                [folder for folder in path.parents if folder.is_relative_to(above) and folder != above]
            ):
                options += ["--perms", "0755", "--dir", str(folder)]
        if path in links:
            options += ["--symlink", os.readlink(path), str(path)] if in_empty else []
            continue
        if path in seen.hidden:
            empty = ["--bind", str(seen.temporary)] if path in TEMPORARY else ["--perms", "0755", "--tmpfs"]
            options += [*empty, str(path)]
            covered[path] = True
        if path in read | written and (path in written or path in seen.hidden or in_empty):
            options += ["--bind" if path in written else "--ro-bind", str(path), str(path)]
            covered[path] = False
    closed = [str(path) for path, empty in covered.items() if empty and path not in TEMPORARY]
    return options + [word for path in closed for word in ("--remount-ro", path)]


def _links(path: Path) -> Iterator[Path]:
    """Links on the way to a path's end, each by the real path of its folder."""
    for part in [*reversed(path.parents), path]:
        if part.is_symlink():
            link = part.parent.resolve() / part.name
            yield link
            yield from _links(link.parent / os.readlink(link))


def _closed_above(path: Path) -> Iterator[Path]:
    """Folders on the way that others than their owner may not pass."""
    for folder in path.resolve().parents:
        if not folder.stat().st_mode & 0o001:
            yield folder
