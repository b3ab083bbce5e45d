"""What Slurm's words mean for a job of ours, and the same for people."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from contracts.control import Outcome
from jobs.engines.slurm.rows import SlurmJob

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ON_NODES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}

# https://slurm.schedmd.com/job_reason_codes.html; what is not here is told as Slurm has it
REASONS = {
    "Resources": "no nodes with all it asks for are free",
    "Priority": "jobs of a higher priority are before it",
    "Dependency": "an earlier submission of it has not ended",
    "BeginTime": "its time to begin has not come",
    "JobHeldUser": "it is held by its user",
    "JobHeldAdmin": "it is held by an administrator",
    "Licenses": "a licence it needs is taken",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "PartitionTimeLimit": "its time limit is longer than the partition's",
    "PartitionConfig": "it asks for what the partition does not have",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has the features it asks for",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "launch_failed_requeued_held": "its start failed on a node, and Slurm holds it",
    "Cleaning": "Slurm cleans up after an earlier try",
}


class SlurmEnding(NamedTuple):
    """How an ended job stands with us where its own report does not say it better."""

    outcome: Outcome
    reason: str


PREEMPTED = "PREEMPTED"
# Here ranks and supervisors were told to end, and know no more.
ENDED_BY_SLURM: dict[str, tuple[Outcome, str]] = {
    "TIMEOUT": ("failed", "its time limit has passed"),
    "DEADLINE": ("failed", "its deadline has passed"),
    "NODE_FAIL": ("lost", "a node failed"),
    PREEMPTED: ("lost", "it was preempted"),
    "OUT_OF_MEMORY": ("failed", "it used more memory than it was given"),
    "BOOT_FAIL": ("lost", "a node did not boot"),
    "REVOKED": ("lost", "it was moved to another cluster"),
    "CANCELLED": ("failed", "it was cancelled there, not by the board"),
}
ENDED_BY_ITSELF: dict[str, tuple[Outcome, str]] = {
    "COMPLETED": ("succeeded", "it completed, and could not tell the board more"),
    "FAILED": ("failed", "its script failed"),
}


def ended(job: SlurmJob) -> bool:
    """Whether nothing of it runs or will; a state that is new to us is waited out."""
    return job.state in ENDED_BY_SLURM or job.state in ENDED_BY_ITSELF


def ending(job: SlurmJob) -> SlurmEnding:
    """How it ended, in Slurm's words; of one that has."""
    outcome, said = {**ENDED_BY_ITSELF, **ENDED_BY_SLURM}[job.state]
    nodes = f" on {job.nodes}" if job.nodes else ""
    why = "" if job.reason in ("", "NonZeroExitCode", "TimeLimit") else f" ({job.reason})"
    return SlurmEnding(outcome, f"Slurm: {said}{why}; job {job.id}{nodes}, {job.state}{_accounted(job)}")


def _accounted(job: SlurmJob) -> str:
    """What accounts alone know: how its script ended, and when."""
    code, _, number = job.exit.partition(":")
    how = f", signal {number}" if number not in ("", "0") else f", exit code {code}" if code not in ("", "0") else ""
    return how if job.elapsed_s is None else f"{how}, after {timedelta(seconds=job.elapsed_s)}"


def forgotten(job: str, *, accounts: bool) -> str:
    """Of a job that Slurm once took and cannot tell of."""
    if accounts:
        return f"Slurm no longer knows its job {job}, and its accounts do not say how it ended"
    return f"Slurm no longer knows its job {job}, and keeps no accounts (sacct) that would say how it ended"


def waits(job: SlurmJob) -> str:
    """Why it waits, and until when."""
    code, _, rest = job.reason.partition(",")
    said = REASONS.get(code, "")
    if not code:  # what it says of a start is when it was handed in
        return "Slurm: has not considered it yet"
    if said:
        text = f"Slurm: waits for {code}: {said}{f' ({rest.strip()})' if rest.strip() else ''}"
    else:
        text = f"Slurm: waits for {job.reason}"
    return f"{text}; expected start {job.start:%Y-%m-%d %H:%M} UTC" if job.start else text


def where(job: SlurmJob) -> str:
    """Where it runs."""
    return f"Slurm runs it on {job.nodes or 'its nodes'}: job {job.id}, partition {job.partition}"


def told(job: SlurmJob) -> dict[str, str]:
    """What a page shows of it."""
    shown = {"state": job.state, "partition": job.partition, "nodes": job.nodes}
    return {what: text for what, text in shown.items() if text}
