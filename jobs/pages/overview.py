"""Show running, waiting, and failed jobs, the hosts, and the next step of a new installation."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.decorators import login_required
from django.db.models import Count, Min, OuterRef, Q, QuerySet, Subquery
from django.db.models.fields.json import KT
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from jobs.core.access import listed_jobs, may_change_hosts, sees_others, visible_jobs
from jobs.models import ON_A_HOST, Attempt, Host, Job, SlotAllocation, StateChange, Status
from jobs.pages.jobs.listing import list_rows
from jobs.pages.jobs.measures import without_status
from jobs.pages.jobs.nowtraffic import rates_of
from jobs.queue.hosts.presentation import TONES, speaks, state_of
from jobs.queue.scheduling.snapshot import free_slots, queue_paused

SHOWN = 6  # lines of each list
MOST_READ = 30  # running jobs whose traffic is read
LATELY = timedelta(days=1)
TROUBLED = (Status.FAILED, Status.LOST)


@require_GET
@login_required
def overview(request: HttpRequest) -> HttpResponse:
    """Show the overview. `?part=live` returns the part that refreshes."""
    now, user = timezone.now(), request.user
    jobs = listed_jobs(user)
    hosts = _hosts()
    context = {
        **_running(jobs),
        **_waiting(jobs, now),
        **_failed(jobs, now),
        **_slots(hosts),
        "hosts": hosts[: 2 * SHOWN],
        "more_hosts": max(0, len(hosts) - 2 * SHOWN),
        "connected": sum(line["state"] == "connected" for line in hosts),
        "num_hosts": len(hosts),
        "any_job": visible_jobs(user).exists(),
        "may_change_hosts": may_change_hosts(user),
        "sees_others": sees_others(user),
    }
    return render(
        request, "overview/live.html" if request.GET.get("part") == "live" else "overview/index.html", context
    )


def _running(jobs: QuerySet[Job]) -> dict[str, Any]:
    found = list(jobs.filter(status__in=ON_A_HOST)[: MOST_READ + 1])
    read = found[:MOST_READ]
    rates = rates_of([(job.id, job.attempt) for job in read])
    lines = list_rows(found[:SHOWN], ["status"])
    for line, job in zip(lines, found, strict=False):
        line["rate"] = rates.get((job.id, job.attempt))
    number = len(found) if len(found) <= MOST_READ else jobs.filter(status__in=ON_A_HOST).count()
    return {
        "running": lines,
        "num_running": number,
        "rate": sum(rates.values()) if rates else None,
        "num_told": len(rates),
    }


def _waiting(jobs: QuerySet[Job], now: datetime) -> dict[str, Any]:
    queued = jobs.filter(status=Status.QUEUED)
    told = queued.order_by().aggregate(number=Count("id"), oldest=Min("changed", filter=Q(held=False)))
    oldest = (now - told["oldest"]).total_seconds() if told["oldest"] else None
    return {
        "waiting": list_rows(list(queued.order_by("-priority", "created")[:SHOWN]), []),
        "num_waiting": told["number"],
        "waited_s": oldest,
        "paused": queue_paused(),
    }


def _failed(jobs: QuerySet[Job], now: datetime) -> dict[str, Any]:
    """Return failed and lost attempts, also of jobs that run again."""
    lately = jobs.filter(archived=False, changed__gte=now - LATELY).order_by().values("id")
    changes = StateChange.objects.filter(job__in=lately, status__in=TROUBLED, at__gte=now - LATELY)
    told = changes.order_by().aggregate(number=Count("id"), jobs=Count("job", distinct=True))
    named = changes.select_related("job").only(
        *("attempt", "status", "reason", "at"), *("job__name", "job__status", "job__attempt")
    )
    ended = Attempt.objects.filter(
        job=OuterRef("job"), number=OuterRef("attempt"), diagnosis__over=True, diagnosis__state="failed"
    )
    verdict = Subquery(ended.annotate(sentence=KT("diagnosis__sentence")).values("sentence")[:1])
    failed = list(named.annotate(verdict=verdict).order_by("-id")[:SHOWN])
    for change in failed:
        change.reason = without_status(change.verdict, change.status) if change.verdict else change.reason
    return {"failed": failed, "num_failed": told["number"], "failed_jobs": told["jobs"]}


def _hosts() -> list[dict[str, Any]]:
    """Return each host with its state and its slots in use. Connected hosts come last."""
    held = dict(SlotAllocation.objects.order_by().values_list("host").annotate(Count("id")))
    states = [(host, state_of(host)) for host in Host.objects.present().order_by("name")]
    states.sort(key=lambda each: each[1] == "connected")
    return [
        {"host": host, "state": state, "tone": TONES[state], "held": held.get(host.pk, 0)} for host, state in states
    ]


def _slots(hosts: list[dict[str, Any]]) -> dict[str, int]:
    """Count the slots of all hosts, and of hosts without contact, which accept no jobs."""
    heard = [line for line in hosts if speaks(line["host"])]
    slots, reached = (sum(line["host"].slots for line in some) for some in (hosts, heard))
    held = sum(line["held"] for line in hosts)
    return {"slots": slots, "held": held, "ready_slots": sum(free_slots().values()), "silent_slots": slots - reached}
