"""What the panels of steps ask of a job."""

from __future__ import annotations

from django import template

from jobs.models import Job
from jobs.runs.traces.pages import LinkRates, get_link_rates

register = template.Library()


@register.filter
def link_speeds(job: Job) -> LinkRates | None:
    """`jobs.runs.traces.pages`, for json_script."""
    return get_link_rates(job)
