"""What the database remembers. Status is written by `jobs.queue.lifecycle` alone."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone

from planner.kinds import kind_of

HOST_SILENT_AFTER = timedelta(seconds=30)
ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def new_job_id() -> str:
    """10 characters of base32: short to read aloud, 50 bits against guessing."""
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(10))


class Status(models.TextChoices):
    """States of a job's current attempt."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    UNREACHABLE = "unreachable"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


TERMINAL = (Status.SUCCEEDED, Status.FAILED, Status.LOST, Status.CANCELLED)
LIVE = tuple(s for s in Status if s not in TERMINAL)
ON_A_HOST = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE, Status.CANCELLING)


class HostQuerySet(models.QuerySet["Host"]):
    def live(self, device: str) -> HostQuerySet:
        """Hosts of a device that were heard of lately."""
        return self.filter(device=device, last_seen__gte=timezone.now() - HOST_SILENT_AFTER)

    def largest_slots(self, device: str) -> int | None:
        """Slots of the largest live host of a device, None while none is known."""
        found: int | None = self.live(device).aggregate(largest=models.Max("slots"))["largest"]
        return found


class Host(models.Model):
    """A machine with slots, as its host worker last described it."""

    name = models.CharField(max_length=100, unique=True)
    slots = models.PositiveIntegerField()
    device = models.CharField(max_length=8)
    device_name = models.CharField(max_length=200)
    memory_bytes = models.BigIntegerField(help_text="per slot")
    boot_id = models.CharField(max_length=64)
    last_seen = models.DateTimeField()
    drained = models.BooleanField(default=False, help_text="takes no new jobs")
    profile = models.JSONField(null=True, editable=False, help_text="what its last calibration measured")
    profiled = models.DateTimeField(null=True, editable=False)

    objects = HostQuerySet.as_manager()

    def __str__(self) -> str:
        return self.name


class JobQuerySet(models.QuerySet["Job"]):
    def visible_to(self, user: Any) -> JobQuerySet:
        """A job is its owner's and the staff's; nobody else learns that it exists."""
        if not (user.is_authenticated and user.is_active):
            return self.none()
        return self if user.is_staff else self.filter(owner=user)


class Job(models.Model):
    """What was asked, what it was predicted to cost, and how its current attempt stands."""

    id = models.CharField(primary_key=True, max_length=16, default=new_job_id, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="jobs")
    name = models.CharField(max_length=100)
    spec = models.JSONField(editable=False)
    estimate = models.JSONField(editable=False)
    priority = models.SmallIntegerField(default=0, help_text="higher first")
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED, editable=False, db_index=True)
    attempt = models.PositiveIntegerField(default=1, editable=False)
    wait_reason = models.CharField(max_length=500, blank=True, editable=False)
    created = models.DateTimeField(auto_now_add=True)
    changed = models.DateTimeField(auto_now=True)

    objects = JobQuerySet.as_manager()

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"

    @property
    def num_slots(self) -> int:
        """Slots the job needs on a host."""
        return kind_of(self.spec).slots(self.world_size)

    @property
    def world_size(self) -> int:
        layout: dict[str, Any] = self.spec["layout"]
        return int(layout["dp"] * layout["pp"] * layout["tp"] * layout.get("cp", 1))  # cp: not in the oldest specs


class Attempt(models.Model):
    """One try of a job on a host. Its number fences off messages about earlier tries."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="attempts")
    created = models.DateTimeField(auto_now_add=True)
    ordered = models.DateTimeField(help_text="when the launch order was last sent")
    exit = models.JSONField(null=True, editable=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "number"], name="one_attempt_per_number")]

    def __str__(self) -> str:
        return f"{self.job_id}/{self.number}"


class SlotAllocation(models.Model):
    """A slot held by a job. The constraint is what keeps two jobs off one slot."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="allocations")
    slot = models.PositiveIntegerField()
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="allocations")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["host", "slot"], name="one_job_per_slot")]

    def __str__(self) -> str:
        return f"{self.host_id}:{self.slot}"


class StateChange(models.Model):
    """History: every change of status, with its reason."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="history")
    attempt = models.PositiveIntegerField()
    status = models.CharField(max_length=16, choices=Status)
    reason = models.CharField(max_length=1000, blank=True)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.job_id} {self.status}"


class Outbox(models.Model):
    """A Celery task to send, written in the transaction that decided it; deleted once sent."""

    task = models.CharField(max_length=100)
    queue = models.CharField(max_length=150)
    arguments = models.JSONField()
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.task} -> {self.queue}"


class Cursor(models.Model):
    """How far a stream was read, and the row whose lock makes scheduling single-flight."""

    name = models.CharField(max_length=50, primary_key=True)
    position = models.CharField(max_length=50, default="0-0")

    def __str__(self) -> str:
        return f"{self.name} {self.position}"


class IdempotentRequest(models.Model):
    """A submit that carried an Idempotency-Key: the same key and body get the same job."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    key = models.CharField(max_length=200)
    body_hash = models.CharField(max_length=64)
    job = models.ForeignKey(Job, on_delete=models.CASCADE)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "key"], name="one_answer_per_key")]

    def __str__(self) -> str:
        return self.key
