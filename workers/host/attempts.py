"""An attempt on disk: RUN_DIR/<job>/<attempt>/, the host's own memory of what it runs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contracts.control import AttemptReport, ExitReport, LaunchOrder

JOB_NAME = re.compile(r"[a-z0-9-]{1,64}")


class ProcessId(NamedTuple):
    """A process for certain: pids are used again, a pid with its start time is not."""

    pid: int
    started: int  # clock ticks since boot


class AttemptDir(NamedTuple):
    """Paths of one attempt."""

    path: Path

    @property
    def job(self) -> str:
        return self.path.parent.name

    @property
    def attempt(self) -> int:
        return int(self.path.name)

    @property
    def order(self) -> Path:
        return self.path / "order.json"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def supervisor(self) -> Path:
        return self.path / "supervisor.pid"

    @property
    def running(self) -> Path:
        return self.path / "running"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def acknowledged(self) -> Path:
        return self.path / "acknowledged"

    def supervisor_alive(self) -> bool:
        recorded = read_json(self.supervisor)
        return recorded is not None and process_id(recorded["pid"]) == ProcessId(recorded["pid"], recorded["started"])

    def report(self) -> AttemptReport:
        exited: ExitReport | None = read_json(self.exit)
        slots: list[int] = read_json(self.order)["slots"]
        if exited is not None:
            return AttemptReport(job=self.job, attempt=self.attempt, state="exited", slots=slots, exit=exited)
        state: Literal["running", "starting"] = "running" if self.running.exists() else "starting"
        return AttemptReport(job=self.job, attempt=self.attempt, state=state, slots=slots)


def attempt_dir(run_dir: Path, job: str, attempt: int) -> AttemptDir:
    """The directory of an attempt.

    Raises:
        ValueError: when the job's name could leave `run_dir`.
    """
    if not JOB_NAME.fullmatch(job) or attempt < 1:
        raise ValueError(f"not an attempt: {job!r} {attempt!r}")
    return AttemptDir(run_dir / job / str(attempt))


def attempts(run_dir: Path) -> Iterator[AttemptDir]:
    """Every attempt this host has on disk whose end the controller has not acknowledged."""
    for path in sorted(run_dir.glob("*/*")):
        found = AttemptDir(path)
        if path.name.isdigit() and found.order.exists() and not found.acknowledged.exists():
            yield found


def claim(run_dir: Path, order: LaunchOrder) -> AttemptDir | None:
    """Make the directory of an order, or None when it was claimed before or a later attempt exists."""
    target = attempt_dir(run_dir, order["job"], order["attempt"])
    target.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = [int(path.name) for path in target.path.parent.iterdir() if path.name.isdigit()]
    if any(number > order["attempt"] for number in known):
        return None
    # Made aside and renamed: a worker killed halfway leaves no claim, so the order is carried out when it comes again.
    draft = AttemptDir(Path(tempfile.mkdtemp(prefix=".claim-", dir=target.path.parent)))
    draft.logs.mkdir()
    write_json(draft.spec, order["spec"])
    write_json(draft.order, order)
    try:
        draft.path.rename(target.path)  # refused by the kernel where another claim, never empty, stands
    except OSError as error:
        shutil.rmtree(draft.path)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise
    return target


def write_json(path: Path, value: object) -> None:
    """By rename, so that a reader sees all of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(path)


def read_json(path: Path) -> Any:
    """The file's value, None when there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def process_id(pid: int) -> ProcessId | None:
    """Identity of a living process, None when there is none (a zombie is none)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))
