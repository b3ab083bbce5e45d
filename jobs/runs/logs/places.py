"""On which host a log lies."""

from __future__ import annotations

from typing import NamedTuple

from django.utils import timezone

from contracts.logs import LogFile
from jobs.models import ELSEWHERE, HOST_SILENT_AFTER, Attempt, Host, Member

LAUNCHER = -1
HOSTS = "hosts"
NOT_STARTED = "The job has not started, so it has no log."


class NoLogError(Exception):
    """There is no log to fetch; says why. `status` is HTTP's."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Place(NamedTuple):
    """A log by its host, and by what the host calls it."""

    job: str
    attempt: int
    host: Host
    rank: int  # -1: the host's launcher
    files: tuple[LogFile, ...]


def place_of(attempt: Attempt, rank: int) -> Place:
    """Where the log of a rank lies; as pages number them, -1 is the launcher of node 0 and -2 that of node 1.

    Raises:
        NoLogError: nobody has it, or nobody who would send it.
    """
    if attempt.job.engine != HOSTS:
        raise NoLogError(409, _kept_by_others(attempt))
    member = member_of(attempt, rank)
    host = member.host
    if host is None or host.removed is not None:
        raise NoLogError(409, f"The log is on host {member.host_name}, which was removed from the board.")
    if host.last_seen < timezone.now() - HOST_SILENT_AFTER:
        seconds = (timezone.now() - host.last_seen).total_seconds()
        raise NoLogError(503, f"The log is on host {host.name}, which has had no contact for {seconds:,.0f} s.")
    files: tuple[LogFile, ...] = ("launcher",) if rank <= LAUNCHER else ("stdout", "stderr")
    return Place(attempt.job_id, attempt.number, host, max(rank, LAUNCHER), files)


def member_of(attempt: Attempt, rank: int) -> Member:
    """Who has the log of a rank, numbered as for `place_of`.

    Raises:
        NoLogError: nobody yet, or no such rank.
    """
    members = list(attempt.members.select_related("host"))
    if not members:
        raise NoLogError(409, NOT_STARTED)
    member = next((member for member in members if _has(member, rank)), None)
    if member is None:
        last = max(member.first_rank + member.num_ranks for member in members) - 1
        ranks = "rank 0" if last == 0 else f"ranks 0 to {last}"
        launchers = "the launcher, -1" if len(members) == 1 else f"launchers -1 to {-len(members)}"
        raise NoLogError(404, f"Rank {rank} does not exist. This attempt has {ranks} and {launchers}.")
    return member


def _has(member: Member, rank: int) -> bool:
    if rank <= LAUNCHER:
        return member.node == LAUNCHER - rank
    return member.first_rank <= rank < member.first_rank + member.num_ranks


def _kept_by_others(attempt: Attempt) -> str:
    if attempt.job.engine == ELSEWHERE:
        where = attempt.where() or "another machine"
        return f"The job runs outside Meshboard, on {where}. The full log is stored on this machine."
    named = f"job {attempt.engine_id}" if attempt.engine_id else "this job"
    return (
        f"The full log of {named} is in the shared folder of the {attempt.job.engine} cluster, "
        "which Meshboard does not read."
    )
