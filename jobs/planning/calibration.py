"""Who may have a host measured, and when: every plan for it is made of what such a job finds."""

from __future__ import annotations

from typing import Any

from jobs.access import may_change_hosts
from jobs.kinds import KINDS
from jobs.models import LIVE, Host, Job
from planner.facts.kinds import num_slots, product_words
from planner.facts.spec import JobSpec, Problem


def calibration_problems(owner: Any, spec: JobSpec) -> list[Problem]:
    """What keeps this job from measuring its host; nothing of a job that measures none."""
    if KINDS[spec.kind].brings != "profile":
        return []
    if not may_change_hosts(owner):
        return [
            Problem("kind", "staff with the right to change hosts start calibrations: plans for a host rest on them")
        ]
    host = Host.objects.filter(name=spec.resources.host).first()
    if host is None:
        return [Problem("resources.host", f"there is no host {spec.resources.host!r}")]
    found = []
    if host.drained:
        found.append(Problem("resources.host", f"{host.name} is drained and takes no new jobs"))
    if Job.objects.filter(kind=spec.kind, wanted_host=host.name, status__in=LIVE).exists():
        found.append(Problem("resources.host", f"a calibration of {host.name} is queued or running already"))
    if num_slots(spec) != host.slots:
        text = f"{product_words(spec.layout)}, and a calibration of {host.name} takes all its {host.slots} slots"
        found.append(Problem("layout", text))
    return found
