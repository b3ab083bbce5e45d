"""The rules that the queue goes by, what staff set, and who set it."""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.utils import timezone

DEFAULT_PROJECT = "default"
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
NAME = RegexValidator(
    r"\A[A-Za-z0-9][A-Za-z0-9._=-]*\Z", "Use letters, digits, and . _ = -, with a letter or digit first."
)


def checked_labels(labels: Any) -> None:
    """A list of words.

    Raises:
        ValidationError: it is none.
    """
    if not isinstance(labels, list) or not all(isinstance(label, str) and len(label) <= 63 for label in labels):
        raise ValidationError("Use a list of labels of at most 63 characters each.")
    for label in labels:
        NAME(label)


class Project(models.Model):
    """Whose jobs share a quota and a fair part. Every job belongs to one."""

    name = models.CharField(max_length=100, unique=True, validators=[NAME])
    slots = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="maximum number of slots that jobs of the project use at once; empty: unlimited",
    )
    own_slots = models.PositiveIntegerField(
        null=True, editable=False, help_text="slot limit from the project admins, if it is lower than `slots`"
    )
    weight = models.FloatField(
        default=1.0,
        validators=[MinValueValidator(LEAST_WEIGHT), MaxValueValidator(MOST_WEIGHT)],
        help_text="fair share of the project, relative to a project with weight 1",
    )
    # Slot-seconds, of which half are forgotten in each half-life (`jobs.queue.scheduling.policy`).
    used = models.FloatField(default=0.0, editable=False)
    counted = models.DateTimeField(
        default=timezone.now, editable=False, help_text="time up to which the use of slots was counted"
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def most_slots(self) -> int | None:
        """That its jobs may hold at once, None for any number."""
        return min((slots for slots in (self.slots, self.own_slots) if slots is not None), default=None)

    @property
    def hours(self) -> float:
        """Slot-hours used, as far as they are not forgotten."""
        return self.used / 3600


class Pool(models.Model):
    """Hosts that have all of some labels, under a name that jobs ask for."""

    name = models.CharField(max_length=100, unique=True, validators=[NAME])
    labels = models.JSONField(default=list, blank=True, validators=[checked_labels], help_text='["a100", "zone=eu"]')
    paused = models.BooleanField(default=False, help_text="hosts of the pool accept no new jobs")

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if self.labels is None:  # which counts as left blank, and no validator is asked
            raise ValidationError({"labels": "Use a list of labels, or [] for no labels."})


class QueueState(models.Model):
    """What is set for the queue as a whole: one row."""

    name = models.CharField(max_length=20, primary_key=True, default="queue")
    paused = models.BooleanField(default=False, help_text="no jobs are started while the queue is paused")

    def __str__(self) -> str:
        return f"{self.name}{' (paused)' if self.paused else ''}"


class Reservation(models.Model):
    """Hosts of a pool, or one host, are a project's alone for a while."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="reservations")
    pool = models.ForeignKey(Pool, on_delete=models.CASCADE, null=True, blank=True)
    host = models.ForeignKey("jobs.Host", on_delete=models.CASCADE, null=True, blank=True)
    starts = models.DateTimeField()
    ends = models.DateTimeField()

    class Meta:
        ordering = ["starts"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(pool__isnull=True) ^ models.Q(host__isnull=True),
                name="reserves_a_pool_or_a_host",
                violation_error_message="Set either a pool or a host for the reservation, not both.",
            ),
            models.CheckConstraint(
                condition=models.Q(ends__gt=models.F("starts")),
                name="reservation_ends_later",
                violation_error_message="The end of the reservation needs to be later than its start.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.pool or self.host} for {self.project} from {self.starts:%Y-%m-%d %H:%M} UTC"


class KeptHost(models.Model):
    """A host that the last pass kept for a job that must wait for it (`jobs.queue.scheduling.placement`)."""

    job = models.ForeignKey("jobs.Job", on_delete=models.CASCADE, related_name="kept_hosts")
    host = models.ForeignKey("jobs.Host", on_delete=models.CASCADE)

    def __str__(self) -> str:
        return f"{self.host_id} for {self.job_id}"


class Dependency(models.Model):
    """A job waits for another to end."""

    job = models.ForeignKey("jobs.Job", on_delete=models.CASCADE, related_name="dependencies")
    needs = models.CharField(max_length=16, help_text="id of the awaited job, which may have been deleted")

    def __str__(self) -> str:
        return f"{self.job_id} after {self.needs}"


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    """Entries are written once: nothing here changes or deletes one."""

    def update(self, **_values: Any) -> NoReturn:
        raise TypeError("Audit entries cannot be changed.")

    def delete(self) -> NoReturn:
        raise TypeError("Audit entries cannot be deleted.")


class AuditEntry(models.Model):
    """What a person did: written in the transaction that did it, and never changed."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    who = models.CharField(max_length=150, help_text="name of the user at that time")
    address = models.CharField(max_length=45, blank=True, help_text="network address of the request")
    what = models.CharField(max_length=50)
    kind = models.CharField(max_length=20, help_text="kind of the changed object: job, host, pool, project, or queue")
    name = models.CharField(max_length=100, help_text="id or name of the object")
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)

    objects = AuditQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["kind", "name"], name="audit_of")]

    def __str__(self) -> str:
        return f"{self.who}: {self.what} {self.kind} {self.name}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Once."""
        if not self._state.adding:
            raise TypeError("Audit entries cannot be changed.")
        super().save(*args, **kwargs)

    def delete(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("Audit entries cannot be deleted.")
