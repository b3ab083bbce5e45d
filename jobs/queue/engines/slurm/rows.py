"""What squeue and sacct print, as rows. Text with a separator: the same from Slurm 20 on, where JSON is not."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

PREFIX = "meshboard"
SEPARATOR = "|"
# job id, state, partition, nodes, start (expected while it waits), name, reason: free text stands last
SQUEUE_FORMAT = SEPARATOR.join(("%A", "%T", "%P", "%N", "%S", "%j", "%r"))
# As many more as accounts know, before the free text: exit code and signal as "3:0", seconds that it ran.
SACCT_FORMAT = "JobIDRaw,State,Partition,NodeList,Start,JobName,ExitCode,ElapsedRaw,Reason"
_NAME = re.compile(rf"{PREFIX}-([a-z0-9-]{{1,64}})-([0-9]{{1,9}})")
_EXIT = re.compile(r"[0-9]{1,3}:[0-9]{1,3}")
HELD = "JobHeld"  # what the reasons of those begin with that somebody holds
HELD_BY_USER = "JobHeldUser"
_PLAIN = {"None", "(null)", "N/A", "Unknown", "None assigned"}


class SlurmJob(NamedTuple):
    """A job as Slurm tells of it; what it does not tell is empty. `start` is expected while the job is pending.

    Accounts alone know the last two: `exit` as "code:signal", and seconds that it ran.
    """

    id: str
    state: str
    partition: str
    nodes: str
    start: datetime | None
    name: str
    reason: str
    exit: str = ""
    elapsed_s: int | None = None


def name_of(job: str, attempt: int) -> str:
    """What an attempt is called in Slurm: by it the attempt is found again when nobody noted its id."""
    return f"{PREFIX}-{job}-{attempt}"


def rows(printed: str) -> list[SlurmJob]:
    """The jobs of ours in what `squeue` printed; of anybody else's nothing is read."""
    return [_job(parts) for parts in _ours(printed, 7)]


def accounted(printed: str) -> list[SlurmJob]:
    """The same of what `sacct` printed. Its reason is why a job last waited, also of one that has ended."""
    found = []
    for *told, code, elapsed, reason in _ours(printed, 9):
        job = _job([*told, reason])
        found.append(
            job._replace(
                reason=job.reason if job.state == "PENDING" else "",
                exit=code if _EXIT.fullmatch(code) else "",
                elapsed_s=int(elapsed) if re.fullmatch(r"[0-9]{1,12}", elapsed) else None,
            )
        )
    return found


def _ours(printed: str, fields: int) -> list[list[str]]:
    lines = [line.strip().split(SEPARATOR, fields - 1) for line in printed.splitlines()]
    return [p for p in lines if len(p) == fields and re.fullmatch("[0-9]+", p[0]) and _NAME.fullmatch(p[5])]


def _job(parts: list[str]) -> SlurmJob:
    job, state, partition, nodes, start, name, reason = parts
    word = state.partition(" ")[0]  # "CANCELLED by 1000"
    return SlurmJob(job, word, _told(partition), _told(nodes), _time(start), name, _told(reason))


def _told(text: str) -> str:
    return "" if text in _PLAIN else text[:300]


def _time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None
