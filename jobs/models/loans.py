"""Checkpoints that travel to an attempt from a host that is none of its own."""

from __future__ import annotations

from django.db import models

from jobs.models.hosts import Host
from jobs.models.jobs import Attempt


class Loan(models.Model):
    """An attempt goes on from what this host has."""

    attempt = models.OneToOneField(Attempt, on_delete=models.CASCADE, related_name="loan")
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="loans")

    def __str__(self) -> str:
        return f"{self.attempt} from {self.host.name}"
