"""Traces of runs that we did not launch."""

from __future__ import annotations

import secrets
from typing import Any

from django.conf import settings
from django.db import models

from jobs.models.jobs import ID_ALPHABET


def new_import_id() -> str:
    """As a job's id, and no job's."""
    return "i" + "".join(secrets.choice(ID_ALPHABET) for _ in range(11))


class ImportQuerySet(models.QuerySet["ImportedTrace"]):
    def visible_to(self, user: Any) -> ImportQuerySet:
        """An import is its owner's and the staff's, as a job is."""
        if not (user.is_authenticated and user.is_active):
            return self.none()
        return self if user.is_staff else self.filter(owner=user)


class ImportedTrace(models.Model):
    """Files that somebody sent, and what was read from them. `format` is "" until they were read."""

    id = models.CharField(primary_key=True, max_length=16, default=new_import_id, editable=False)
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
