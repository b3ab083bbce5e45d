"""Hosts as everybody sees them, and what a calibration measured of one."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from jobs.access import may_change_hosts, visible_jobs
from jobs.models import LIVE, Host, Job
from jobs.queue import actions
from planner.facts.spec import SpecError


@require_GET
@login_required
def hosts(request: HttpRequest) -> HttpResponse:
    """Every host that was ever heard of."""
    known = [{"host": host, "free": host.slots - host.allocations.count()} for host in Host.objects.order_by("name")]
    return render(request, "hosts/list.html", {"hosts": known})


@require_GET
@login_required
def host(request: HttpRequest, name: str) -> HttpResponse:
    """One host, and its calibration."""
    found = get_object_or_404(Host, name=name)
    context = {
        "host": found,
        "free": found.slots - found.allocations.count(),
        "profile": found.profile,
        "gemm": _gemm(found.profile) if found.profile else [],
        "running": _running(request.user, found),
    }
    return render(request, "hosts/detail.html", context)


@require_POST
@login_required
def calibrate(request: HttpRequest, name: str) -> HttpResponse:
    """Queue a calibration, then to its job. Staff with the right only."""
    user = cast(User, request.user)
    if not may_change_hosts(user):
        raise PermissionDenied
    try:
        job = actions.calibrate(user, get_object_or_404(Host, name=name))
    except SpecError as error:
        messages.error(request, "; ".join(p.message for p in error.problems))
        return redirect("host", name)
    return redirect("job-detail", job.id)


def _running(user: Any, found: Host) -> Job | None:
    """A calibration of this host that has not ended, if the user may know of it."""
    jobs = visible_jobs(user).filter(status__in=LIVE, kind="calibrate", wanted_host=found.name)
    return jobs.order_by("created").first()


def _gemm(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Products by size with the rate of one rank."""
    return [{**p, "gflops": 2 * p["m"] * p["n"] * p["k"] / p["seconds"] / 1e9} for p in profile["gemm"]]
