"""Jobs, attempts, and their hosts. Only `jobs.queue.lifecycle` writes the status of a job."""

from __future__ import annotations

import secrets
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone

from jobs.models.hosts import Host
from jobs.models.people import get_project_names
from jobs.models.policy import DEFAULT_PROJECT

EXTERNAL_ENGINE = "elsewhere"  # engine of runs that another launcher started and that report over HTTPS
MAX_REASON_CHARACTERS, MAX_WAIT_REASON_CHARACTERS = 1000, 500
ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


VERIFICATION_FAILED = (
    "The verification of this run failed, so the latest checkpoint may be wrong. "
    "Copy the job, or start a new job from an earlier checkpoint."
)


def make_random_text(length: int) -> str:
    """Return random base32 characters of 5 bits each."""
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(length))


def make_job_id() -> str:
    """Return a job id, which is short to read aloud and has 50 random bits."""
    return make_random_text(10)


def compute_num_ranks(layout: dict[str, Any]) -> int:
    """Return the world size of a stored layout. The oldest layouts have no cp."""
    return int(layout["dp"] * layout["pp"] * layout["tp"] * layout.get("cp", 1))


class Status(models.TextChoices):
    """Status of the current attempt of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    UNREACHABLE = "unreachable"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


_STATUS_PHRASES = {
    Status.CANCELLING: "is being cancelled",
    Status.SUCCEEDED: "succeeded",
    Status.FAILED: "failed",
    Status.LOST: "was lost",
    Status.CANCELLED: "was cancelled",
}


def describe_status(status: str) -> str:
    """Return the status as the predicate of a sentence, such as 'is queued' or 'succeeded'."""
    return _STATUS_PHRASES.get(Status(status), f"is {status}")


TERMINAL = (Status.SUCCEEDED, Status.FAILED, Status.LOST, Status.CANCELLED)
LIVE = tuple(s for s in Status if s not in TERMINAL)
OCCUPIES_HOST = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE, Status.CANCELLING)


class JobQuerySet(models.QuerySet["Job"]):
    def visible_to(self, user: Any) -> JobQuerySet:
        """Return the jobs that the user owns or sees as a project member, and all jobs for staff."""
        if not (user.is_authenticated and user.is_active):
            return self.none()
        if user.is_staff:
            return self
        mine, projects = models.Q(owner=user), get_project_names(user)
        return self.filter(mine | models.Q(project__in=projects) if projects else mine)


def make_upload_id() -> str:
    """Return a random id that differs from each job id by its length."""
    return "u" + make_random_text(11)


class Upload(models.Model):
    """Archive of a script that a user uploaded. Until the archive is complete and checked, `sha256` is empty."""

    id = models.CharField(primary_key=True, max_length=16, default=make_upload_id, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="uploads")
    name = models.CharField(max_length=100)
    size = models.PositiveIntegerField(help_text="size of the file, in bytes")
    sha256 = models.CharField(max_length=64, blank=True, default="", editable=False)
    files = models.PositiveIntegerField(default=0, editable=False, help_text="number of files in the archive")
    unpacked_bytes = models.PositiveBigIntegerField(default=0, editable=False)
    sent = models.DateTimeField(default=timezone.now, help_text="time when the user last sent this content")

    class Meta:
        ordering = ["-sent"]
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "sha256"], condition=~models.Q(sha256=""), name="one_upload_per_content"
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"


class Job(models.Model):
    """A job: its request, its estimate, and the status of its current attempt."""

    id = models.CharField(primary_key=True, max_length=16, default=make_job_id, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="jobs")
    name = models.CharField(max_length=100)
    spec = models.JSONField(editable=False)
    # Copies of spec fields that lists and the scheduler query.
    kind = models.CharField(max_length=16, editable=False)
    device = models.CharField(max_length=8, editable=False)
    num_slots = models.PositiveIntegerField(editable=False)
    wanted_host = models.CharField(max_length=100, blank=True, default="", editable=False)
    engine = models.CharField(
        max_length=16, default="hosts", editable=False, help_text="launcher that places and starts the job"
    )
    estimate = models.JSONField(editable=False)
    hardware = models.JSONField(
        null=True,
        editable=False,
        help_text="cluster for which the job was planned, without corrections from earlier runs",
    )
    chosen = models.JSONField(
        null=True, editable=False, help_text="request and reason of an automatic layout choice; null for other jobs"
    )
    check_of = models.ForeignKey(
        "self",
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="checks",
        help_text="original job that this reference check repeats",
    )
    upload = models.ForeignKey(
        Upload,
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="jobs",
        help_text="archive of the script; null if the script is on the hosts, or the archive was deleted",
    )
    unit = models.PositiveIntegerField(
        default=1, editable=False, help_text="number of slots that need to be on one host"
    )
    wide_unit = models.PositiveIntegerField(
        default=1, editable=False, help_text="number of slots that are placed on one host if possible"
    )
    max_hosts = models.PositiveIntegerField(
        default=1, editable=False, help_text="maximum number of hosts; 0: any number"
    )
    pool = models.CharField(max_length=100, blank=True, default="", editable=False)
    labels = models.JSONField(default=list, editable=False, help_text="labels that the hosts of the job need")
    project = models.CharField(max_length=100, default=DEFAULT_PROJECT, editable=False, db_index=True)
    time_limit_s = models.PositiveIntegerField(null=True, editable=False)
    idle_limit_s = models.PositiveIntegerField(null=True, editable=False)
    preemptible = models.BooleanField(default=False, editable=False)
    # Set by staff to change the order of the queue.
    priority = models.SmallIntegerField(default=0, help_text="queue priority; jobs with a higher priority start first")
    moved = models.FloatField(
        default=0.0, editable=False, help_text="extra points in the queue after staff moved the job"
    )
    held = models.BooleanField(default=False, editable=False, help_text="the job does not start until staff release it")
    stop = models.CharField(
        max_length=16,
        default="",
        editable=False,
        help_text="reason why the board ends the current attempt (see queue.termination)",
    )
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED, editable=False, db_index=True)
    attempt = models.PositiveIntegerField(default=1, editable=False)
    wait_reason = models.CharField(max_length=MAX_WAIT_REASON_CHARACTERS, blank=True, editable=False)
    trace_id = models.CharField(
        max_length=32,
        default="",
        db_default="",
        editable=False,
        help_text="W3C trace ID of the request that submitted the job",
    )
    archived = models.BooleanField(
        default=False, editable=False, help_text="the job has ended, and lists hide it by default"
    )
    created = models.DateTimeField(auto_now_add=True)
    changed = models.DateTimeField(auto_now=True)

    objects = JobQuerySet.as_manager()

    class Meta:
        ordering = ["-created"]
        indexes = [
            models.Index(fields=["-created"], name="job_newest"),
            models.Index(fields=["owner", "-created"], name="job_newest_of_owner"),
            models.Index(fields=["project", "-created"], name="job_newest_of_project"),
            models.Index(fields=["status", "-priority", "created"], name="job_queue"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"

    @property
    def world_size(self) -> int:
        return compute_num_ranks(self.spec["layout"])

    def has_failed_verification(self) -> bool:
        """Return whether the current attempt differs between its ranks or from the reference."""
        wrong = self.attempts.filter(number=self.attempt).values_list("exit__summary__proof__wrong", flat=True)
        return bool(wrong.first())

    def get_retry_reason(self) -> str | None:
        """Return why the ended job is queued again, None if it is not queued again."""
        if self.has_failed_verification():
            return None
        if self.stop == "preempted" and self.status == Status.CANCELLED:
            return "preempted by a job with higher priority, and resumes from the latest checkpoint"
        max_attempts = int(self.spec.get("retry", {}).get("max_attempts", 1))
        failures = (Status.FAILED, Status.LOST)
        if self.status not in failures or self.stop == "time limit" or max_attempts == 1:
            return None
        num_failed = self.history.filter(status__in=failures).count()
        if num_failed >= max_attempts:
            return None
        retry = f"retry {num_failed + 1} of {max_attempts} from the latest checkpoint"
        verb = "was" if self.status == Status.LOST else "has"
        return f"{retry}, because attempt {self.attempt} {verb} {self.status}"


class JobTag(models.Model):
    """A tag that a user added to a job."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="tags")
    name = models.CharField(max_length=50)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["job", "name"], name="one_tag_per_name")]
        indexes = [models.Index(fields=["name"], name="tag_name")]

    def __str__(self) -> str:
        return self.name


class Attempt(models.Model):
    """One attempt of a job. Messages with a lower attempt number are rejected."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    created = models.DateTimeField(auto_now_add=True)
    backfilled = models.BooleanField(
        default=False,
        db_default=False,
        editable=False,
        help_text="the attempt uses hosts that are reserved for an earlier job",
    )
    exit = models.JSONField(
        null=True, editable=False, help_text="exit report of the attempt, after the job has ended on all hosts"
    )
    ended = models.DateTimeField(null=True, editable=False, help_text="time when the job had ended on all hosts")
    checkpoint = models.CharField(
        max_length=100,
        default="",
        blank=True,
        editable=False,
        help_text="latest checkpoint of the attempt, from which a retry resumes",
    )
    engine_id = models.CharField(
        max_length=100,
        default="",
        blank=True,
        editable=False,
        help_text="id of the attempt in its launcher, such as the Slurm job id",
    )
    engine_told = models.JSONField(
        default=dict, editable=False, help_text="last state that the launcher reported, for display"
    )
    engine_ended = models.DateTimeField(
        null=True, editable=False, help_text="time when the attempt ended in its launcher"
    )
    recorded = models.DateTimeField(
        null=True, editable=False, help_text="time when the recorder had stored the complete history of the attempt"
    )

    diagnosis = models.JSONField(null=True, editable=False, help_text="last verdict of the attempt")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "number"], name="one_attempt_per_number")]
        indexes = [models.Index(fields=["id"], condition=models.Q(recorded__isnull=True), name="attempts_to_record")]

    def __str__(self) -> str:
        return f"{self.job_id}/{self.number}"

    def format_hosts(self) -> str:
        """Return the host names in the order of their ranks."""
        return ", ".join(member.host_name for member in self.members.all())


class Member(models.Model):
    """One host of an attempt, with its slots and consecutive ranks."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="members")
    node = models.PositiveIntegerField(help_text="number of the host within the attempt; rank 0 is on node 0")
    # None if Meshboard does not manage the machine, such as a Slurm node.
    host = models.ForeignKey(Host, on_delete=models.PROTECT, null=True, related_name="members")
    host_name = models.CharField(max_length=100)
    first_rank = models.PositiveIntegerField()
    num_ranks = models.PositiveIntegerField()
    ordered = models.DateTimeField(help_text="time when the launch order was last sent to the host")
    exit = models.JSONField(
        null=True, editable=False, help_text="exit report of this host, until the attempt has an exit report"
    )
    outcome = models.CharField(
        max_length=16,
        default="",
        blank=True,
        editable=False,
        help_text="outcome on this host (contracts.control.Outcome); lost without a report",
    )
    reason = models.CharField(
        max_length=MAX_REASON_CHARACTERS, default="", blank=True, editable=False, help_text="reason of the outcome"
    )
    ended = models.DateTimeField(
        null=True,
        editable=False,
        help_text="time when the attempt ended on this host and released its slots",
    )
    missed = models.PositiveIntegerField(
        default=0,
        editable=False,
        help_text="number of consecutive heartbeats in which the host did not list the attempt",
    )
    note = models.CharField(max_length=1000, blank=True, default="", editable=False)
    # Set when the node first reports over HTTPS.
    claim = models.CharField(
        max_length=64,
        blank=True,
        default="",
        editable=False,
        help_text="hash of the secret of the process that reports for this node",
    )
    heard = models.DateTimeField(null=True, editable=False, help_text="time of the last report from this node")

    class Meta:
        ordering = ["node"]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "node"], name="one_member_per_node"),
            models.UniqueConstraint(fields=["attempt", "host_name"], name="one_member_per_host"),
        ]

    def __str__(self) -> str:
        return f"{self.attempt_id} on {self.host_name}"


class RunToken(models.Model):
    """Token that allows reports of one attempt over HTTPS. Only its hash is stored."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="tokens")
    digest = models.CharField(max_length=64, unique=True)
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"a token of {self.attempt_id}"


class SlotAllocation(models.Model):
    """A slot that a member occupies until it has ended. A constraint allows one attempt per slot."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="allocations")
    slot = models.PositiveIntegerField()
    member = models.ForeignKey(Member, on_delete=models.CASCADE, related_name="allocations")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["host", "slot"], name="one_attempt_per_slot")]

    def __str__(self) -> str:
        return f"{self.host_id}:{self.slot}"


class StateChange(models.Model):
    """A change of the status of a job, with its reason."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="history")
    attempt = models.PositiveIntegerField()
    status = models.CharField(max_length=16, choices=Status)
    reason = models.CharField(max_length=MAX_REASON_CHARACTERS, blank=True)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.job_id} {self.status}"


class Loan(models.Model):
    """Host that sends its checkpoint to an attempt on other hosts."""

    attempt = models.OneToOneField(Attempt, on_delete=models.CASCADE, related_name="loan")
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="loans")

    def __str__(self) -> str:
        return f"{self.attempt} from {self.host.name}"
