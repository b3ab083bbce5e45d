"""What the board keeps for itself, so that nothing acknowledged is lost and nothing is done twice."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from jobs.models.jobs import Job

NOTHING_READ = "0-0"  # of a stream


class Outbox(models.Model):
    """A Celery task to send, written in the transaction that decided it; deleted once sent."""

    task = models.CharField(max_length=100)
    queue = models.CharField(max_length=150)
    arguments = models.JSONField()
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.task} -> {self.queue}"


def cursor_of(host: str) -> str:
    """Which `Cursor` says how far a host was heard."""
    return f"events:{host}"


class Cursor(models.Model):
    """How far a stream was read; and what the scheduler keeps from pass to pass, with the row that it locks."""

    name = models.CharField(max_length=150, primary_key=True)
    position = models.CharField(max_length=50, default=NOTHING_READ)
    again_to = models.CharField(
        max_length=50, default=NOTHING_READ, help_text="entries up to this position may be repetitions"
    )

    def __str__(self) -> str:
        return f"{self.name} {self.position}"


class Lease(models.Model):
    """Which controller works: whoever last moved `beats`. One that moves no more has lost it, whatever clocks say."""

    name = models.CharField(max_length=50, primary_key=True)
    holder = models.CharField(max_length=200, blank=True)
    beats = models.BigIntegerField(default=0)
    ticked = models.DateTimeField(null=True, help_text="end of the last tick in which every stage succeeded")
    pruned = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.name}: {self.holder or 'nobody'}"


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


class DeadLetter(models.Model):
    """An event that could not be taken in: kept for staff, so that the ones behind it are."""

    entry = models.CharField(max_length=50, help_text="id of the event in the event stream of the host")
    sender = models.CharField(max_length=100, blank=True, help_text="name of the host that sent the event")
    reason = models.CharField(max_length=1000)
    body = models.TextField(help_text="text of the event, truncated to 4,000 characters")
    num_bytes = models.PositiveBigIntegerField()
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.entry} {self.reason[:60]}"
