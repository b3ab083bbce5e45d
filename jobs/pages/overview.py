"""The overview of jobs and hosts, and the search of the command palette."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Min, OuterRef, Q, QuerySet, Subquery
from django.db.models.fields.json import KT
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from jobs.core.access import (
    can_see_jobs_of_others,
    get_listable_jobs,
    get_visible_jobs,
    get_visible_projects,
    may_change_hosts,
)
from jobs.core.text import is_storable
from jobs.models import OCCUPIES_HOST, Attempt, Host, Job, SlotAllocation, StateChange, Status
from jobs.pages.jobs.listing import list_rows
from jobs.pages.jobs.live_figures import traffic_cache
from jobs.pages.jobs.measures import without_status
from jobs.queue.hosts.presentation import CONTACT_STATE_TONES, get_contact_state, is_in_contact
from jobs.queue.scheduling.snapshot import count_free_slots, is_queue_paused

MAX_LINES = 6  # per list
MAX_TRAFFIC_JOBS = 30  # running jobs whose traffic is read
RECENT = timedelta(days=1)
FAILED = (Status.FAILED, Status.LOST)
MAX_MATCHES = 8  # of each kind
MAX_SEARCH_LENGTH = 100  # characters


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """Show the overview. `?part=live` returns the part that refreshes."""
    now, user = timezone.now(), request.user
    jobs = get_listable_jobs(user)
    hosts = _list_hosts()
    context = {
        **_list_running(jobs),
        **_list_waiting(jobs, now),
        **_list_failed(jobs, now),
        **_count_slots(hosts),
        "hosts": hosts[: 2 * MAX_LINES],
        "more_hosts": max(0, len(hosts) - 2 * MAX_LINES),
        "connected": sum(line["state"] == "connected" for line in hosts),
        "num_hosts": len(hosts),
        "any_job": get_visible_jobs(user).exists(),
        "may_change_hosts": may_change_hosts(user),
        "sees_others": can_see_jobs_of_others(user),
    }
    return render(
        request, "overview/live.html" if request.GET.get("part") == "live" else "overview/index.html", context
    )


def _list_running(jobs: QuerySet[Job]) -> dict[str, Any]:
    found = list(jobs.filter(status__in=OCCUPIES_HOST)[: MAX_TRAFFIC_JOBS + 1])
    read = found[:MAX_TRAFFIC_JOBS]
    rates = traffic_cache.get([(job.id, job.attempt) for job in read])
    lines = list_rows(found[:MAX_LINES], ["status"])
    for line, job in zip(lines, found, strict=False):
        line["rate"] = rates.get((job.id, job.attempt))
    number = len(found) if len(found) <= MAX_TRAFFIC_JOBS else jobs.filter(status__in=OCCUPIES_HOST).count()
    return {
        "running": lines,
        "num_running": number,
        "rate": sum(rates.values()) if rates else None,
        "num_measured": len(rates),
    }


def _list_waiting(jobs: QuerySet[Job], now: datetime) -> dict[str, Any]:
    queued = jobs.filter(status=Status.QUEUED)
    counts = queued.order_by().aggregate(number=Count("id"), oldest=Min("changed", filter=Q(held=False)))
    return {
        "waiting": list_rows(list(queued.order_by("-priority", "created")[:MAX_LINES]), []),
        "num_waiting": counts["number"],
        "waited_s": (now - counts["oldest"]).total_seconds() if counts["oldest"] else None,
        "paused": is_queue_paused(),
    }


def _list_failed(jobs: QuerySet[Job], now: datetime) -> dict[str, Any]:
    """Return failed and lost attempts, also of jobs that run again."""
    recent = jobs.filter(archived=False, changed__gte=now - RECENT).order_by().values("id")
    changes = StateChange.objects.filter(job__in=recent, status__in=FAILED, at__gte=now - RECENT)
    counts = changes.order_by().aggregate(number=Count("id"), jobs=Count("job", distinct=True))
    named = changes.select_related("job").only(
        *("attempt", "status", "reason", "at"), *("job__name", "job__status", "job__attempt")
    )
    ended = Attempt.objects.filter(
        job=OuterRef("job"), number=OuterRef("attempt"), diagnosis__over=True, diagnosis__state="failed"
    )
    verdict = Subquery(ended.annotate(sentence=KT("diagnosis__sentence")).values("sentence")[:1])
    failed = list(named.annotate(verdict=verdict).order_by("-id")[:MAX_LINES])
    for change in failed:
        change.reason = without_status(change.verdict, change.status) if change.verdict else change.reason
    return {"failed": failed, "num_failed": counts["number"], "failed_jobs": counts["jobs"]}


def _list_hosts() -> list[dict[str, Any]]:
    """Return each host with its state and its slots in use. Connected hosts come last."""
    held = dict(SlotAllocation.objects.order_by().values_list("host").annotate(Count("id")))
    states = [(host, get_contact_state(host)) for host in Host.objects.present().order_by("name")]
    states.sort(key=lambda each: each[1] == "connected")
    return [
        {"host": host, "state": state, "tone": CONTACT_STATE_TONES[state], "held": held.get(host.pk, 0)}
        for host, state in states
    ]


def _count_slots(hosts: list[dict[str, Any]]) -> dict[str, int]:
    """Count the slots of all hosts, and of hosts without contact, which accept no jobs."""
    return {
        "slots": sum(line["host"].slots for line in hosts),
        "held": sum(line["held"] for line in hosts),
        "ready_slots": sum(count_free_slots().values()),
        "silent_slots": sum(line["host"].slots for line in hosts if not is_in_contact(line["host"])),
    }


@require_GET
def find(request: HttpRequest) -> JsonResponse:
    """Return hosts, projects and the newest jobs whose name contains `q`, and jobs whose id begins with `q`."""
    words = request.GET.get("q", "").strip()[:MAX_SEARCH_LENGTH]
    if not is_storable(words):
        return JsonResponse({"jobs": [], "hosts": [], "projects": []})
    jobs = get_visible_jobs(request.user).filter(Q(name__icontains=words) | Q(id__startswith=words.lower()))
    projects = get_visible_projects(request.user).filter(name__icontains=words).order_by("name")
    hosts = Host.objects.present().filter(name__icontains=words).order_by("name")
    return JsonResponse(
        {
            "jobs": [
                {"id": job.id, "name": job.name, "status": job.status, "url": reverse("job-detail", args=[job.id])}
                for job in jobs.only("id", "name", "status", "owner__username")[:MAX_MATCHES]
            ],
            "hosts": [
                {"name": host.name, "state": get_contact_state(host), "url": reverse("host", args=[host.name])}
                for host in hosts[:MAX_MATCHES]
            ],
            "projects": [
                {"name": project.name, "url": reverse("project", args=[project.name])}
                for project in projects[:MAX_MATCHES]
            ],
        }
    )
