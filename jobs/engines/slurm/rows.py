"""What squeue and sacct print, as rows. Text with a separator: the same from Slurm 20 on, where JSON is not."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

PREFIX = "meshboard"
SEPARATOR = "|"
# job id, state, partition, nodes, start (expected while it waits), name, reason: free text stands last
SQUEUE_FORMAT = SEPARATOR.join(("%A", "%T", "%P", "%N", "%S", "%j", "%r"))
SACCT_FORMAT = "JobIDRaw,State,Partition,NodeList,Start,JobName,Reason"
_NAME = re.compile(rf"{PREFIX}-([a-z0-9-]{{1,64}})-([0-9]{{1,9}})")
_PLAIN = {"None", "(null)", "N/A", "Unknown", "None assigned"}


class SlurmJob(NamedTuple):
    """A job as Slurm tells of it; what it does not tell is empty. `start` is expected while the job is pending."""

    id: str
    state: str
    partition: str
    nodes: str
    start: datetime | None
    name: str
    reason: str


def name_of(job: str, attempt: int) -> str:
    """What an attempt is called in Slurm: by it the attempt is found again when nobody noted its id."""
    return f"{PREFIX}-{job}-{attempt}"


def rows(printed: str) -> list[SlurmJob]:
    """The jobs of ours in what `squeue` or `sacct` printed; of anybody else's nothing is read."""
    found = []
    for line in printed.splitlines():
        parts = line.strip().split(SEPARATOR, 6)
        if len(parts) != 7 or not parts[0].isascii() or not parts[0].isdigit() or not _NAME.fullmatch(parts[5]):
            continue
        job, state, partition, nodes, start, name, reason = parts
        word = state.partition(" ")[0]  # "CANCELLED by 1000"
        found.append(SlurmJob(job, word, _told(partition), _told(nodes), _time(start), name, _told(reason)))
    return found


def _told(text: str) -> str:
    return "" if text in _PLAIN else text[:300]


def _time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None
