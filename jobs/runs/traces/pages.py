"""Serve the timeline page of a job."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET
from pydantic import ValidationError
from typing_extensions import TypedDict

from jobs.core.access import find_job, may_change
from jobs.core.job_details import serialize_job
from jobs.core.kinds import format_layout
from jobs.models import Job
from planner.hardware.cluster import Basis, Cluster


@require_GET
@login_required
def timeline(request: HttpRequest, job_id: str) -> HttpResponse:
    """Render the timeline of every rank at full width, with heat maps."""
    job = find_job(request.user, job_id)
    context = {
        "job": job,
        "data": serialize_job(job),
        "layout": format_layout(job.spec),
        "alone": True,
        "may_change": may_change(request.user, job),
    }
    return render(request, "timeline/page.html", context)


class LinkRates(TypedDict):
    """Hold the bytes per second that a rank can send in its node and to other nodes. `per_node` ranks share one node.

    Args:
        link_runs: The number of runs that measured `node_bytes_per_s`, 0 if the rate comes from `basis`.
    """

    name: str
    basis: Basis
    per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    link_runs: int


def get_link_rates(job: Job) -> LinkRates | None:
    """Return the link rates of the hardware for which the job was planned, or None."""
    if not job.hardware:
        return None
    try:
        cluster = Cluster.model_validate(job.hardware, strict=False)
    except ValidationError:  # stored by an earlier version
        return None
    return {
        "name": cluster.name,
        "basis": cluster.basis,
        "per_node": cluster.per_node,
        "node_bytes_per_s": cluster.node.bytes_per_s,
        "network_bytes_per_s": cluster.network.bytes_per_s,
        "link_runs": cluster.num_rate_runs,
    }
