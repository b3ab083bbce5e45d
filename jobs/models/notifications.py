"""Webhooks of projects, mail subscriptions of users, and the queue of deliveries."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from jobs.models.jobs import Job, make_random_text


def make_webhook_id() -> str:
    """Return a random id that differs from each job id by its length."""
    return "w" + make_random_text(11)


def make_delivery_key() -> str:
    """Return a key by which receivers recognize repeated deliveries."""
    return "d" + make_random_text(19)


class Webhook(models.Model):
    """Address that receives state changes of jobs of a project. The secret is derived from `generation`."""

    id = models.CharField(primary_key=True, max_length=16, default=make_webhook_id, editable=False)
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
    """Statuses for which a user receives mail, for own jobs or for all jobs of a project."""

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
    """Request of a user for one mail when a job has ended. It is deleted when the mail is queued."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="end_wishes")
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="end_wishes")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "user"], name="one_end_wish_per_job")]

    def __str__(self) -> str:
        return f"{self.user_id}: {self.job_id}"


class Outcome(models.TextChoices):
    """State of a delivery."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"


class Delivery(models.Model):
    """One message to one receiver, created in the transaction that it reports."""

    key = models.CharField(max_length=20, unique=True, default=make_delivery_key, editable=False)
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
    tries = models.JSONField(
        default=list, help_text="all tries (jobs.people.notifications.payloads.DeliveryTry), newest last"
    )

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
