"""Projects, pools, reservations, and other rules of the queue, and the audit log of their changes."""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

from jobs.models.validators import IDENTIFIER, check_labels

DEFAULT_PROJECT = "default"
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


class Project(models.Model):
    """A project, whose jobs share a quota and a fair share of the slots."""

    name = models.CharField(max_length=100, unique=True, validators=[IDENTIFIER])
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
        validators=[MinValueValidator(MIN_WEIGHT), MaxValueValidator(MAX_WEIGHT)],
        help_text="fair share of the project, relative to a project with weight 1",
    )
    # Slot-seconds with exponential decay (`jobs.queue.scheduling.policy`).
    used = models.FloatField(default=0.0, editable=False)
    counted = models.DateTimeField(
        default=timezone.now, editable=False, help_text="time up to which the use of slots was counted"
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def max_slots(self) -> int | None:
        """Return the maximum number of slots in use at once, None if unlimited."""
        return min((slots for slots in (self.slots, self.own_slots) if slots is not None), default=None)

    @property
    def used_slot_hours(self) -> float:
        """Return the recent use in slot-hours."""
        return self.used / 3600


class Pool(models.Model):
    """Named set of the hosts that have all labels of the pool."""

    name = models.CharField(max_length=100, unique=True, validators=[IDENTIFIER])
    labels = models.JSONField(default=list, blank=True, validators=[check_labels], help_text='["a100", "zone=eu"]')
    paused = models.BooleanField(default=False, help_text="hosts of the pool accept no new jobs")

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if self.labels is None:  # Django skips the validators of a blank value
            raise ValidationError({"labels": "Use a list of labels, or [] for no labels."})


class QueueState(models.Model):
    """State of the whole queue, stored in one row."""

    name = models.CharField(max_length=20, primary_key=True, default="queue")
    paused = models.BooleanField(default=False, help_text="no jobs are started while the queue is paused")

    def __str__(self) -> str:
        return f"{self.name}{' (paused)' if self.paused else ''}"


class Reservation(models.Model):
    """Time range in which only one project uses a pool or a host."""

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
    """A host that the last pass reserved for a waiting job (`jobs.queue.scheduling.placement`)."""

    job = models.ForeignKey("jobs.Job", on_delete=models.CASCADE, related_name="kept_hosts")
    host = models.ForeignKey("jobs.Host", on_delete=models.CASCADE)

    def __str__(self) -> str:
        return f"{self.host_id} for {self.job_id}"


class Dependency(models.Model):
    """A job that starts only after another job has ended."""

    job = models.ForeignKey("jobs.Job", on_delete=models.CASCADE, related_name="dependencies")
    needs = models.CharField(max_length=16, help_text="id of the awaited job, which may have been deleted")

    def __str__(self) -> str:
        return f"{self.job_id} after {self.needs}"


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    """Query set of audit entries, which cannot be changed or deleted."""

    def update(self, **_values: Any) -> NoReturn:
        raise TypeError("Audit entries cannot be changed.")

    def delete(self) -> NoReturn:
        raise TypeError("Audit entries cannot be deleted.")


class AuditEntry(models.Model):
    """An action of a user, recorded in the transaction that made the change."""

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
        """Store a new entry. Stored entries cannot be changed."""
        if not self._state.adding:
            raise TypeError("Audit entries cannot be changed.")
        super().save(*args, **kwargs)

    def delete(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("Audit entries cannot be deleted.")
