"""What the palette finds by name: jobs, hosts and projects."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.db.models import Q
from django.http import HttpRequest, JsonResponse
from django.urls import reverse
from django.views.decorators.http import require_GET

from jobs.core.access import visible_jobs, visible_projects
from jobs.core.text import storable
from jobs.models import Host
from jobs.queue.hosts.presentation import state_of

MOST = 8  # of each
LONGEST = 100  # characters


@require_GET
@login_required
def find(request: HttpRequest) -> JsonResponse:
    """The newest jobs whose name holds `q` or whose id begins with it, and hosts and projects whose name holds it."""
    words = request.GET.get("q", "").strip()[:LONGEST]
    if not storable(words):
        return JsonResponse({"jobs": [], "hosts": [], "projects": []})
    jobs = visible_jobs(request.user).filter(Q(name__icontains=words) | Q(id__startswith=words.lower()))
    projects = visible_projects(request.user).filter(name__icontains=words).order_by("name")
    hosts = Host.objects.present().filter(name__icontains=words).order_by("name")
    return JsonResponse(
        {
            "jobs": [
                {"id": job.id, "name": job.name, "status": job.status, "url": reverse("job-detail", args=[job.id])}
                for job in jobs.only("id", "name", "status", "owner__username")[:MOST]
            ],
            "hosts": [
                {"name": host.name, "state": state_of(host), "url": reverse("host", args=[host.name])}
                for host in hosts[:MOST]
            ],
            "projects": [
                {"name": project.name, "url": reverse("project", args=[project.name])} for project in projects[:MOST]
            ],
        }
    )
