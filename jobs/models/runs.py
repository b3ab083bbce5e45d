"""Records of runs: runs of other launchers, imported traces, baselines, and measurements for a host."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from jobs.models.hosts import Host
from jobs.models.jobs import Attempt, make_random_text
from jobs.models.validators import MAX_BRANCH_CHARACTERS


class ReportedRun(models.Model):
    """Command and tags that a run of another launcher reported at its start."""

    attempt = models.OneToOneField(Attempt, on_delete=models.CASCADE, related_name="reported")
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    key = models.CharField(
        max_length=200,
        blank=True,
        default="",
        help_text="key of the run; each node that opens a run with this key gets this run",
    )
    tags = models.JSONField(default=list)
    command = models.JSONField(default=list)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "key"], condition=~models.Q(key=""), name="one_run_per_key")
        ]

    def __str__(self) -> str:
        return f"external run of {self.attempt_id}"


class HostRun(models.Model):
    """Measurements of a run on a host (`planner.hardware.profile.MeasuredRun`), which outlive the job."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="runs")
    attempt = models.OneToOneField(Attempt, on_delete=models.SET_NULL, null=True, related_name="measured")
    device_name = models.CharField(max_length=200, help_text="device of the host at the time of the run")
    run = models.JSONField()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"a run on {self.host_id}"


class BaselineRun(models.Model):
    """Copy of the measurements of a run of a branch, because the job may be deleted.

    `owner` is set only in the project `default`, in which each user has own baselines.
    """

    project = models.CharField(max_length=100)
    branch = models.CharField(max_length=MAX_BRANCH_CHARACTERS)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, null=True, related_name="baselines")
    job = models.CharField(max_length=16, help_text="id of the job, which may have been deleted")
    name = models.CharField(max_length=100, help_text="name of the job")
    facts = models.JSONField(help_text="jobs.runs.baselines.Facts")
    spec = models.JSONField(null=True, help_text="spec fields that affect the results; null if they are not stored")
    by = models.CharField(max_length=150, help_text="name of the user who set the baseline")
    at = models.DateTimeField(auto_now=True, help_text="time when the baseline was set")

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["project", "branch", "job"], condition=Q(owner=None), name="one_baseline_per_job"
            ),
            models.UniqueConstraint(fields=["owner", "project", "branch", "job"], name="one_baseline_per_owner"),
        ]

    def __str__(self) -> str:
        return f"{self.job} of {self.project}/{self.branch}"


def make_import_id() -> str:
    """Return a random id that differs from each job id by its length."""
    return "i" + make_random_text(11)


class ImportQuerySet(models.QuerySet["ImportedTrace"]):
    def visible_to(self, user: Any) -> ImportQuerySet:
        """Return the imports of the user, and all imports for staff."""
        if not (user.is_authenticated and user.is_active):
            return self.none()
        return self if user.is_staff else self.filter(owner=user)


class ImportedTrace(models.Model):
    """Trace files from a user, and their summary. `format` is empty until the files are parsed."""

    id = models.CharField(primary_key=True, max_length=16, default=make_import_id, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="imports")
    name = models.CharField(max_length=100)
    created = models.DateTimeField(auto_now_add=True)
    size = models.BigIntegerField(help_text="total size of the sent files, in bytes")
    files = models.JSONField(
        default=list, editable=False, help_text="names and sizes of the files: [[name, bytes], ...]"
    )
    format = models.CharField(max_length=32, blank=True, default="", editable=False)
    ranks = models.PositiveIntegerField(default=0, editable=False)
    events = models.PositiveIntegerField(default=0, editable=False)
    steps = models.JSONField(default=list, editable=False)
    notes = models.JSONField(default=list, editable=False, help_text="notes about the import, as sentences")

    objects = ImportQuerySet.as_manager()

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"
