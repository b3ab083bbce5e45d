"""Runs that builds are held to."""

from __future__ import annotations

import re

from django.conf import settings
from django.db import models
from django.db.models import Q

from jobs.models.names import unfit

LONGEST_BRANCH = 200
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{")  # as `git check-ref-format` has it
NO_PART = re.compile(r"\..*|.*\.lock|")


def branch_problem(name: str) -> str:
    """Why no baseline may be of it, empty where one may: git names no branch so, or nobody could read it."""
    if len(name) > LONGEST_BRANCH:
        return f"The branch name has {len(name)} characters. Use at most {LONGEST_BRANCH} characters."
    if any(NO_PART.fullmatch(part) for part in name.split("/")):
        return (
            "A part of the branch name is empty, starts with a period, or ends with .lock. Use a valid Git branch name."
        )
    if found := NO_BRANCH.search(name):
        return f"The branch name contains {found[0]!r}. Use a valid Git branch name."
    if name.startswith("-") or name.endswith(".") or name == "HEAD":
        return "The branch name starts with a hyphen, ends with a period, or is HEAD. Use a valid Git branch name."
    return unfit(name)


class BaselineRun(models.Model):
    """What a run of a branch measured: a copy, for its job may be forgotten. `owner` is None but in the project
    `default`, where everybody has baselines of their own."""

    project = models.CharField(max_length=100)
    branch = models.CharField(max_length=LONGEST_BRANCH)
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
