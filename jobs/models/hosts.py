"""Hosts, and the tokens with which machines join."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import models
from django.utils import timezone

from jobs.models.validators import check_labels

HOST_SILENT_AFTER = timedelta(seconds=30)


class HostQuerySet(models.QuerySet["Host"]):
    def present(self) -> HostQuerySet:
        """Return hosts that staff did not remove."""
        return self.filter(removed__isnull=True)

    def reachable(self) -> HostQuerySet:
        """Return present hosts with a recent heartbeat."""
        return self.present().filter(last_seen__gte=timezone.now() - HOST_SILENT_AFTER)

    def accepting_jobs(self) -> HostQuerySet:
        """Return hosts that accept jobs now. `AvailableHosts.takes` in `jobs.planning` checks one host."""
        open_again = models.Q(closed_until=None) | models.Q(closed_until__lte=timezone.now())
        return self.reachable().filter(open_again, drained=False, problem="")


class Host(models.Model):
    """A machine with slots, as its host worker last reported it."""

    name = models.CharField(max_length=100, unique=True)
    slots = models.PositiveIntegerField()
    device = models.CharField(max_length=8)
    device_name = models.CharField(max_length=200)
    memory_bytes = models.BigIntegerField(help_text="memory per slot, in bytes")
    boot_id = models.CharField(max_length=200)
    address = models.CharField(
        max_length=45, default="", blank=True, help_text="address at which other hosts reach this host"
    )
    last_seen = models.DateTimeField()
    drained = models.BooleanField(default=False, help_text="the host accepts no new jobs")
    labels = models.JSONField(default=list, blank=True, validators=[check_labels], help_text='["a100", "zone=eu"]')
    # Order of heartbeats: a heartbeat that is older than the last accepted one is ignored.
    incarnation = models.CharField(max_length=200, default="", editable=False)
    began = models.FloatField(
        default=0, editable=False, help_text="Unix time at which this process of the host worker started"
    )
    sequence = models.BigIntegerField(default=0, editable=False)
    holding = models.JSONField(
        default=list,
        editable=False,
        help_text="slots of running attempts in the last report of the host: [job, attempt, slots]",
    )
    note = models.CharField(
        max_length=1000, default="", blank=True, editable=False, help_text="latest warning from the host"
    )
    profile = models.JSONField(null=True, editable=False, help_text="result of the last calibration of the host")
    profiled = models.DateTimeField(null=True, editable=False)
    # `jobs.core.credentials` derives the signing key and the Redis password from the generation.
    generation = models.PositiveIntegerField(
        default=0, editable=False, help_text="number of times that a machine joined under this host name"
    )
    identity_hash = models.CharField(
        max_length=64,
        default="",
        editable=False,
        help_text="SHA-256 hash of the identity that the machine sent when it joined",
    )
    joined = models.DateTimeField(null=True, editable=False)
    joined_from = models.CharField(
        max_length=45, default="", editable=False, help_text="network address of the machine when it joined"
    )
    removed = models.DateTimeField(null=True, editable=False, help_text="time when staff removed the host")
    given_up = models.DateTimeField(null=True, editable=False, help_text="time when staff last marked the host as lost")
    facts = models.JSONField(
        null=True, editable=False, help_text="hardware that the host last reported (contracts.hosts.HostFacts)"
    )
    use = models.JSONField(
        null=True, editable=False, help_text="load that the host last reported (contracts.hosts.HostUsage)"
    )

    problem = models.CharField(
        max_length=1000,
        default="",
        db_default="",
        editable=False,
        help_text="why the last health check of the host failed",
    )
    num_faults = models.PositiveIntegerField(
        default=0, db_default=0, editable=False, help_text="number of launches in a row that failed because of the host"
    )
    closed_until = models.DateTimeField(
        null=True, editable=False, help_text="time until which the host starts no jobs, after several such launches"
    )
    closed_reason = models.CharField(
        max_length=1000, default="", db_default="", editable=False, help_text="reason of the last fault"
    )

    objects = HostQuerySet.as_manager()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def get_problem(self) -> str:
        """Return why the host is sick, or an empty text."""
        return find_host_problem(self.problem, self.closed_until, self.closed_reason, timezone.now())


def find_host_problem(problem: str, closed_until: datetime | None, closed_reason: str, now: datetime) -> str:
    """Return why a host with these fields is sick, or an empty text."""
    if problem or closed_until is None or closed_until <= now:
        return problem
    return f"Several launches in a row failed. The next launch is possible at {closed_until:%H:%M} UTC. {closed_reason}"


class JoinToken(models.Model):
    """Token with which machines join as hosts. The token is shown once, and only its hash is stored."""

    hash = models.CharField(max_length=64, unique=True, editable=False, help_text="SHA-256")
    note = models.CharField(max_length=200, blank=True, default="", help_text="purpose of the token")
    created = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150, editable=False)
    expires = models.DateTimeField()
    most_uses = models.PositiveIntegerField(
        null=True, help_text="maximum number of hosts that can join with the token; empty: unlimited"
    )
    uses = models.PositiveIntegerField(default=0, editable=False)
    last_used = models.DateTimeField(null=True, editable=False)
    last_host = models.CharField(max_length=100, blank=True, default="", editable=False)
    labels = models.JSONField(default=list, editable=False, help_text="labels of each host that joins with the token")
    revoked = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"join token {self.pk}"
