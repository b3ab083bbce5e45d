"""Who may have a host measured, and when: every plan for it is made of what such a job finds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jobs.access import may_change_hosts
from jobs.kinds import KINDS
from jobs.models import LIVE, Job
from jobs.planning.there import There
from planner.facts.kinds import num_slots, product_words
from planner.facts.spec import JobSpec, Problem
from planner.facts.words import counted


def calibration_problems(owner: Any, spec: JobSpec, there: Iterable[There]) -> list[Problem]:
    """What keeps this job from measuring its host; nothing of a job that measures none. That there is no such host
    `jobs.planning.room` says. `there`: `hosts_there`."""
    if KINDS[spec.kind].brings != "profile":
        return []
    if not may_change_hosts(owner):
        return [
            Problem("kind", "staff with the right to change hosts start calibrations: plans for a host rest on them")
        ]
    asked = spec.resources.host, spec.resources.device
    host = next((host for host in there if (host.name, host.device) == asked), None)
    if host is None:
        return []
    found = []
    if host.drained:
        found.append(Problem("resources.host", f"{host.name} is drained and takes no new jobs"))
    if Job.objects.filter(kind=spec.kind, wanted_host=host.name, status__in=LIVE).exists():
        found.append(Problem("resources.host", f"a calibration of {host.name} is queued or running already"))
    if num_slots(spec) != host.slots:
        slots = counted(host.slots, "slot")
        text = f"{product_words(spec.layout)}, and a calibration of {host.name} takes all its {slots}"
        found.append(Problem("layout", text))
    return found
