"""Whose earlier attempt may still be alive: given up, or on a host that came back with it. Two never train at once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import F
from django.utils import timezone

from jobs.models import HOST_SILENT_AFTER, Host, Member

# From the last word of a host to the last of its supervisor, and from the end of the lease to that of the ranks.
MARGIN = timedelta(seconds=30)


def held_back(queued: set[str], now: datetime | None = None) -> Mapping[str, str]:
    """Of queued jobs that ran before those that must not start yet, and why.

    A member of a gang on a silent host ends by itself when its lease is over; one that is heard of, or a supervisor of
    which is, is told to end. A job on one host has no lease: who gives its host up takes it upon himself that nothing
    lives there.
    """
    if not queued:
        return {}
    now = now or timezone.now()
    waits = dict([*_still_heard(queued, now), *_still_held(queued)])
    lease = timedelta(seconds=settings.LEASE_S) + MARGIN
    untold = Member.objects.filter(
        attempt__job_id__in=queued, outcome="lost", host__last_seen__lt=F("ended")
    ).order_by()
    in_gangs = untold.filter(attempt__members__node__gt=0).distinct()
    rows = in_gangs.values_list("attempt__job_id", "attempt__number", "host_name", "host__last_seen", "heard")
    for job, number, host, last_seen, heard in rows:
        ends = max(last_seen, heard or last_seen) + lease
        if job not in waits and ends > now:
            until = f"{ends:%H:%M:%S} UTC"
            waits[job] = f"attempt {number} may still run on silent host {host} until its lease ends at {until}"
    return waits


def _still_heard(queued: set[str], now: datetime) -> list[tuple[str, str]]:
    """Also where it runs elsewhere now than it should: a supervisor speaks of what has ended for the board."""
    speak = Member.objects.filter(attempt__job_id__in=queued, outcome="lost", heard__gt=F("ended"))
    rows = speak.filter(heard__gte=now - HOST_SILENT_AFTER).order_by()
    return [
        (job, f"waiting until the supervisor process on host {name} ends attempt {number}")
        for job, number, name in rows.values_list("attempt__job_id", "attempt__number", "host_name")
    ]


def _still_held(queued: set[str]) -> list[tuple[str, str]]:
    """What a host said before it was given up counts no more."""
    known = Host.objects.present().exclude(holding=[]).exclude(given_up__gt=F("last_seen"))
    return [
        (job, f"waiting until host {name} ends attempt {number}")
        for name, holding in known.values_list("name", "holding")
        for job, number, _ in holding
        if job in queued
    ]
