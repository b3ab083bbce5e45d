"""The page of a job's steps, event by event."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from jobs.core.access import find_job, may_change
from jobs.core.job_details import job_detail
from jobs.core.kinds import layout_words


@require_GET
@login_required
def timeline(request: HttpRequest, job_id: str) -> HttpResponse:
    """Every rank's timeline with all the room there is, and the heat maps below it."""
    job = find_job(request.user, job_id)
    context = {
        "job": job,
        "data": job_detail(job),
        "layout": layout_words(job.spec),
        "alone": True,
        "may_change": may_change(request.user, job),
    }
    return render(request, "timeline/page.html", context)
