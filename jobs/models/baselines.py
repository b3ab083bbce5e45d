"""Runs that builds are held to."""

from __future__ import annotations

import re

from django.conf import settings
from django.db import models
from django.db.models import Q

from jobs.naming import unfit

LONGEST_BRANCH = 200
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{")  # as `git check-ref-format` has it
NO_PART = re.compile(r"\..*|.*\.lock|")


def branch_problem(name: str) -> str:
    """Why no baseline may be of it, empty where one may: git names no branch so, or nobody could read it."""
    if len(name) > LONGEST_BRANCH:
        return f"has {len(name)} characters, of at most {LONGEST_BRANCH}"
    if any(NO_PART.fullmatch(part) for part in name.split("/")):
        return "has a part between slashes that is empty, begins with . or ends with .lock"
    if found := NO_BRANCH.search(name):
        return f"has {found[0]!r}, which git allows in no branch"
    if name.startswith("-") or name.endswith(".") or name == "HEAD":
        return "begins with -, ends with . or is HEAD, as git names no branch"
    return unfit(name)


class BaselineRun(models.Model):
    """What a run of a branch measured: a copy, for its job may be forgotten. `owner` is None but in the project
    `default`, where everybody has baselines of their own."""

    project = models.CharField(max_length=100)
    branch = models.CharField(max_length=LONGEST_BRANCH)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, null=True, related_name="baselines")
    job = models.CharField(max_length=16, help_text="its id; there may be no such job any more")
    name = models.CharField(max_length=100, help_text="the job's")
    facts = models.JSONField(help_text="jobs.baselines.facts.Facts")
    spec = models.JSONField(null=True, help_text="what the facts hang on, of its spec; null where that was not kept")
    by = models.CharField(max_length=150, help_text="who said that it is one")
    at = models.DateTimeField(auto_now=True, help_text="when")

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
