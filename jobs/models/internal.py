"""Internal state of the controller and REST: outbox, stream positions, lease, and idempotency keys."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from jobs.models.jobs import MAX_REASON_CHARACTERS, Job

STREAM_START = "0-0"  # position before the first entry of a Redis stream


class Outbox(models.Model):
    """A Celery task to send. Its row is created in the deciding transaction and deleted after the send."""

    task = models.CharField(max_length=100)
    queue = models.CharField(max_length=150)
    arguments = models.JSONField()
    created = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.task} -> {self.queue}"


def get_cursor_name(host: str) -> str:
    """Return the name of the `Cursor` of the event stream of a host."""
    return f"events:{host}"


class Cursor(models.Model):
    """Read position of a stream, or the state of the scheduler between passes, which lock this row."""

    name = models.CharField(max_length=150, primary_key=True)
    position = models.CharField(max_length=50, default=STREAM_START)
    again_to = models.CharField(
        max_length=50, default=STREAM_START, help_text="entries up to this position may be repetitions"
    )

    def __str__(self) -> str:
        return f"{self.name} {self.position}"


class Lease(models.Model):
    """Lease of the active controller, which increments `beats`. A lease with constant `beats` is lost."""

    name = models.CharField(max_length=50, primary_key=True)
    holder = models.CharField(max_length=200, blank=True)
    beats = models.BigIntegerField(default=0)
    ticked = models.DateTimeField(null=True, help_text="end of the last tick in which every stage succeeded")
    pruned = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.name}: {self.holder or 'nobody'}"


class IdempotentRequest(models.Model):
    """A submit with an Idempotency-Key. A repeated key and body return this job."""

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
    """An event that failed to be processed, stored for staff so that later events continue."""

    entry = models.CharField(max_length=50, help_text="id of the event in the event stream of the host")
    sender = models.CharField(max_length=100, blank=True, help_text="name of the host that sent the event")
    reason = models.CharField(max_length=MAX_REASON_CHARACTERS)
    body = models.TextField(help_text="text of the event, truncated to 4,000 characters")
    num_bytes = models.PositiveBigIntegerField()
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.entry} {self.reason[:60]}"
