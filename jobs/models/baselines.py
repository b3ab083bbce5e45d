"""Runs that builds are held to."""

from __future__ import annotations

import re

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q

LONGEST_BRANCH = 200
BRANCH_PATTERN = rf"[A-Za-z0-9_][A-Za-z0-9._/+=@#-]{{0,{LONGEST_BRANCH - 1}}}"
BRANCH = RegexValidator(rf"\A{BRANCH_PATTERN}\Z", "as git names branches: letters, digits and . _ / + = @ # -")


def is_branch(name: str) -> bool:
    """Whether a baseline may be of it: as git names branches, and of parts that no address is changed by."""
    return re.fullmatch(BRANCH_PATTERN, name) is not None and not {"", ".", ".."} & set(name.split("/"))


class BaselineRun(models.Model):
    """What a run of a branch measured: a copy, for its job may be forgotten. `owner` is None but in the project
    `default`, where everybody has baselines of their own."""

    project = models.CharField(max_length=100)
    branch = models.CharField(max_length=LONGEST_BRANCH, validators=[BRANCH])
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, null=True, related_name="baselines")
    job = models.CharField(max_length=16, help_text="its id; there may be no such job any more")
    name = models.CharField(max_length=100, help_text="the job's")
    facts = models.JSONField(help_text="jobs.baselines.facts.Facts")
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
