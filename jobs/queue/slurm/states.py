"""What squeue and sacct print, as rows. Text with a separator: the same from Slurm 20 on, where JSON is not.

What Slurm's words mean for a job of ours, and the same for people.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from contracts.control import Outcome

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


def format_job_name(job: str, attempt: int) -> str:
    """What an attempt is called in Slurm: by it the attempt is found again when nobody noted its id."""
    return f"{PREFIX}-{job}-{attempt}"


def parse_squeue(printed: str) -> list[SlurmJob]:
    """The jobs of ours in what `squeue` printed; of anybody else's nothing is read."""
    return [_job(parts) for parts in _ours(printed, 7)]


def parse_sacct(printed: str) -> list[SlurmJob]:
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


WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ON_NODES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}

# https://slurm.schedmd.com/job_reason_codes.html; what is not here is told as Slurm has it
REASONS = {
    "Resources": "not enough free nodes with the requested resources",
    "Priority": "jobs with a higher priority are ahead",
    "Dependency": "an earlier submission of this job has not ended",
    "BeginTime": "the begin time of the job is in the future",
    "JobHeldUser": "held by its user",
    "JobHeldAdmin": "held by an administrator",
    "Licenses": "a required license is in use",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "the job requests more nodes than the partition allows",
    "PartitionTimeLimit": "the time limit exceeds the limit of the partition",
    "PartitionConfig": "the partition lacks the requested resources",
    "ReqNodeNotAvail": "required nodes are down, drained, or reserved",
    "Reservation": "the reservation has not started",
    "NodeDown": "a required node is down",
    "BadConstraints": "no node has the requested features",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "launch_failed_requeued_held": "the job could not start on a node, so Slurm holds the job",
    "Cleaning": "Slurm is still cleaning up after an earlier attempt",
}


class SlurmOutcome(NamedTuple):
    """How an ended job stands with us where its own report does not say it better."""

    outcome: Outcome
    reason: str


PREEMPTED = "PREEMPTED"
# Here ranks and supervisors were told to end, and know no more.
ENDED_BY_SLURM: dict[str, tuple[Outcome, str]] = {
    "TIMEOUT": ("failed", "the job reached its time limit"),
    "DEADLINE": ("failed", "the job reached its deadline"),
    "NODE_FAIL": ("lost", "a node failed"),
    PREEMPTED: ("lost", "the job was preempted"),
    "OUT_OF_MEMORY": ("failed", "the job used more memory than allocated"),
    "BOOT_FAIL": ("lost", "a node did not boot"),
    "REVOKED": ("lost", "the job was moved to another cluster"),
    "CANCELLED": ("failed", "the job was cancelled in Slurm, not in Meshboard"),
}
ENDED_BY_ITSELF: dict[str, tuple[Outcome, str]] = {
    "COMPLETED": ("succeeded", "the job completed without an exit report"),
    "FAILED": ("failed", "the batch script failed"),
}


def has_ended(job: SlurmJob) -> bool:
    """Whether nothing of it runs or will; a state that is new to us is waited out."""
    return job.state in ENDED_BY_SLURM or job.state in ENDED_BY_ITSELF


def describe_end(job: SlurmJob) -> SlurmOutcome:
    """How it ended, in Slurm's words; of one that has."""
    outcome, said = {**ENDED_BY_ITSELF, **ENDED_BY_SLURM}[job.state]
    nodes = f" on {job.nodes}" if job.nodes else ""
    why = "" if job.reason in ("", "NonZeroExitCode", "TimeLimit") else f" ({job.reason})"
    return SlurmOutcome(outcome, f"Slurm: {said}{why}; job {job.id}{nodes}, {job.state}{_accounted(job)}")


def _accounted(job: SlurmJob) -> str:
    """What accounts alone know: how its script ended, and when."""
    code, _, number = job.exit.partition(":")
    how = f", signal {number}" if number not in ("", "0") else f", exit code {code}" if code not in ("", "0") else ""
    return how if job.elapsed_s is None else f"{how}, after {timedelta(seconds=job.elapsed_s)}"


def describe_missing_record(job: str, *, accounts: bool) -> str:
    """Of a job that Slurm once took and cannot tell of."""
    if accounts:
        return f"Slurm has no record of how job {job} ended"
    return f"Slurm no longer knows job {job}, and Slurm accounting (sacct) is off"


def describe_wait(job: SlurmJob) -> str:
    """Why it waits, and until when."""
    code, _, rest = job.reason.partition(",")
    said = REASONS.get(code, "")
    if not code:  # what it says of a start is when it was handed in
        return "Slurm: waiting for the first scheduling pass"
    if said:
        text = f"Slurm: waiting for {code}: {said}{f' ({rest.strip()})' if rest.strip() else ''}"
    else:
        text = f"Slurm: waiting for {job.reason}"
    return f"{text}, expected start {job.start:%Y-%m-%d %H:%M} UTC" if job.start else text


def describe_location(job: SlurmJob) -> str:
    """Where it runs."""
    return f"Running on {job.nodes or 'Slurm nodes'}: Slurm job {job.id}, partition {job.partition}"


def get_page_fields(job: SlurmJob) -> dict[str, str]:
    """What a page shows of it."""
    shown = {"state": job.state, "partition": job.partition, "nodes": job.nodes}
    return {what: text for what, text in shown.items() if text}
