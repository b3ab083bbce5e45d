"""Parse what squeue and sacct print, and describe the states of Slurm jobs.

Text with separators is equal from Slurm 20 on, and JSON output is not.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from contracts.control import Outcome

NAME_PREFIX = "meshboard"
SEPARATOR = "|"
# Job ID, state, partition, nodes, start, name, reason. Free text is last.
SQUEUE_FORMAT = SEPARATOR.join(("%A", "%T", "%P", "%N", "%S", "%j", "%r"))
# Two more fields before the free text: exit code and signal such as "3:0", and seconds that the job ran.
SACCT_FORMAT = "JobIDRaw,State,Partition,NodeList,Start,JobName,ExitCode,ElapsedRaw,Reason"
_NAME = re.compile(rf"{NAME_PREFIX}-([a-z0-9-]{{1,64}})-([0-9]{{1,9}})")
_EXIT = re.compile(r"[0-9]{1,3}:[0-9]{1,3}")
HELD = "JobHeld"  # prefix of the reasons of held jobs
HELD_BY_USER = "JobHeldUser"
EMPTY_VALUES = {"None", "(null)", "N/A", "Unknown", "None assigned"}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}

# https://slurm.schedmd.com/job_reason_codes.html, other codes are shown unchanged
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
PREEMPTED = "PREEMPTED"
# Slurm ended ranks and supervisors, which do not know why.
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


class SlurmJob(NamedTuple):
    """A job as Slurm reports it. Unknown fields are empty."""

    id: str
    state: str
    partition: str
    nodes: str
    start: datetime | None  # expected while the job is pending
    name: str
    reason: str
    exit: str = ""  # "code:signal", only from sacct
    elapsed_s: int | None = None  # only from sacct


class SlurmOutcome(NamedTuple):
    """The outcome of an ended job, for attempts without an exit report."""

    outcome: Outcome
    reason: str


def format_job_name(job: str, attempt: int) -> str:
    """Return the name of an attempt in Slurm, which also finds attempts whose Slurm ID was not stored."""
    return f"{NAME_PREFIX}-{job}-{attempt}"


def parse_squeue(printed: str) -> list[SlurmJob]:
    """Parse Meshboard's jobs in the output of squeue."""
    return [_parse_job(fields) for fields in _split_rows(printed, 7)]


def parse_sacct(printed: str) -> list[SlurmJob]:
    """Parse Meshboard's jobs in the output of sacct, which also has the last wait reason of ended jobs."""
    found = []
    for *fields, code, elapsed, reason in _split_rows(printed, 9):
        job = _parse_job([*fields, reason])
        found.append(
            job._replace(
                reason=job.reason if job.state == "PENDING" else "",
                exit=code if _EXIT.fullmatch(code) else "",
                elapsed_s=int(elapsed) if re.fullmatch(r"[0-9]{1,12}", elapsed) else None,
            )
        )
    return found


def _split_rows(printed: str, num_fields: int) -> list[list[str]]:
    lines = [line.strip().split(SEPARATOR, num_fields - 1) for line in printed.splitlines()]
    return [p for p in lines if len(p) == num_fields and re.fullmatch("[0-9]+", p[0]) and _NAME.fullmatch(p[5])]


def _parse_job(fields: list[str]) -> SlurmJob:
    partition, nodes, reason = ("" if fields[i] in EMPTY_VALUES else fields[i][:300] for i in (2, 3, 6))
    try:
        start = datetime.strptime(fields[4], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        start = None
    state = fields[1].partition(" ")[0]  # "CANCELLED by 1000"
    return SlurmJob(fields[0], state, partition, nodes, start, fields[5], reason)


def has_ended(job: SlurmJob) -> bool:
    """Return whether a job has ended for good. Unknown states count as not ended."""
    return job.state in ENDED_BY_SLURM or job.state in ENDED_BY_ITSELF


def describe_end(job: SlurmJob) -> SlurmOutcome:
    """Describe how an ended job ended."""
    outcome, text = {**ENDED_BY_ITSELF, **ENDED_BY_SLURM}[job.state]
    nodes = f" on {job.nodes}" if job.nodes else ""
    why = "" if job.reason in ("", "NonZeroExitCode", "TimeLimit") else f" ({job.reason})"
    code, _, signal = job.exit.partition(":")
    how = f", signal {signal}" if signal not in ("", "0") else f", exit code {code}" if code not in ("", "0") else ""
    after = "" if job.elapsed_s is None else f", after {timedelta(seconds=job.elapsed_s)}"
    return SlurmOutcome(outcome, f"Slurm: {text}{why}; job {job.id}{nodes}, {job.state}{how}{after}")


def describe_missing_record(job: str, *, accounts: bool) -> str:
    """Explain that Slurm no longer knows a submitted job. `accounts`: sacct is on."""
    if accounts:
        return f"Slurm has no record of how job {job} ended"
    return f"Slurm no longer knows job {job}, and Slurm accounting (sacct) is off"


def describe_wait(job: SlurmJob) -> str:
    """Explain why a pending job waits, and until when."""
    code, _, rest = job.reason.partition(",")
    if not code:  # the start is then only the time of the submission
        return "Slurm: waiting for the first scheduling pass"
    text = f"Slurm: waiting for {job.reason}"
    if code in REASONS:
        text = f"Slurm: waiting for {code}: {REASONS[code]}{f' ({rest.strip()})' if rest.strip() else ''}"
    return f"{text}, expected start {job.start:%Y-%m-%d %H:%M} UTC" if job.start else text


def describe_location(job: SlurmJob) -> str:
    return f"Running on {job.nodes or 'Slurm nodes'}: Slurm job {job.id}, partition {job.partition}"


def get_page_fields(job: SlurmJob) -> dict[str, str]:
    """Return the fields of a job that its page shows."""
    shown = {"state": job.state, "partition": job.partition, "nodes": job.nodes}
    return {name: text for name, text in shown.items() if text}
