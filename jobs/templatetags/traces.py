"""What the panels of steps ask of a job."""

from __future__ import annotations

from django import template

from jobs.models import Job
from jobs.runs.traces.links import Links, links

register = template.Library()


@register.filter
def link_speeds(job: Job) -> Links | None:
    """`jobs.runs.traces.links`, for json_script."""
    return links(job)
