"""Whom jobs tell of themselves: webhooks of projects, mails to people, and what is on its way to them."""

from __future__ import annotations

import secrets

from django.conf import settings
from django.db import models
from django.utils import timezone

from jobs.models.jobs import ID_ALPHABET, Job


def _random(length: int) -> str:
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(length))


def new_webhook_id() -> str:
    """As a job's id, and no job's."""
    return "w" + _random(11)


def new_delivery_key() -> str:
    """What a receiver tells repeats apart by."""
    return "d" + _random(19)


class Webhook(models.Model):
    """Where a project's jobs tell of themselves. Its secret is made from its generation, and kept nowhere."""

    id = models.CharField(primary_key=True, max_length=16, default=new_webhook_id, editable=False)
    project = models.CharField(max_length=100, db_index=True)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="webhooks")
    name = models.CharField(max_length=100)
    url = models.CharField(max_length=2000)
    states = models.JSONField(
        default=list, help_text="statuses for which the webhook sends a message; empty: all statuses"
    )
    job = models.CharField(
        max_length=16, blank=True, default="", help_text="id of the only job that the webhook reports; empty: all jobs"
    )
    everybody = models.BooleanField(
        default=False, help_text="report all jobs of the project, not only jobs of the webhook owner"
    )
    active = models.BooleanField(default=True)
    generation = models.PositiveIntegerField(default=1, editable=False, help_text="number of the current secret")
    rotated = models.DateTimeField(null=True, editable=False, help_text="time when the secret was last replaced")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["created"]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"


class MailWish(models.Model):
    """Of which states somebody wants mail: of one's own jobs, or of those of a project that one may see."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="mail_wishes")
    project = models.CharField(
        max_length=100, blank=True, default="", help_text="name of the project; empty: own jobs in all projects"
    )
    states = models.JSONField(default=list)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "project"], name="one_wish_per_project")]
        indexes = [models.Index(fields=["project"], name="wish_of_project")]

    def __str__(self) -> str:
        return f"{self.user_id}: {self.project or 'own jobs'}"


class EndWish(models.Model):
    """Somebody is to be mailed once, when this job has ended. It goes with the job, and once it was written."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="end_wishes")
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="end_wishes")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "user"], name="one_end_wish_per_job")]

    def __str__(self) -> str:
        return f"{self.user_id}: {self.job_id}"


class Outcome(models.TextChoices):
    """How a delivery stands."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"


class Delivery(models.Model):
    """One message to one receiver, written in the transaction that it tells of; `due` until it is over."""

    key = models.CharField(max_length=20, unique=True, default=new_delivery_key, editable=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, null=True, related_name="deliveries")
    person = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, null=True, related_name="mails")
    event = models.CharField(max_length=16)
    job = models.CharField(
        max_length=16, blank=True, default="", help_text="id of the job, which may have been deleted"
    )
    body = models.TextField(help_text="exact JSON text that is signed and sent")
    created = models.DateTimeField(default=timezone.now)
    since = models.DateTimeField(default=timezone.now, help_text="time of the first try; retries stop one day later")
    due = models.DateTimeField(null=True, default=timezone.now, help_text="time of the next try; null: no further try")
    outcome = models.CharField(max_length=16, choices=Outcome, default=Outcome.WAITING)
    tries = models.JSONField(default=list, help_text="all tries (jobs.people.notifications.shapes.Try), newest last")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(webhook__isnull=True) ^ models.Q(person__isnull=True), name="told_by_one_way"
            )
        ]
        indexes = [
            models.Index(fields=["due"], condition=models.Q(due__isnull=False), name="deliveries_due"),
            models.Index(fields=["webhook", "-id"], name="deliveries_of_webhook"),
        ]

    def __str__(self) -> str:
        return f"{self.key} {self.outcome}"
