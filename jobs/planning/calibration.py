"""Who may have a host measured, and when: every plan for it is made of what such a job finds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jobs.core.access import may_change_hosts
from jobs.core.kinds import KINDS
from jobs.models import LIVE, Job
from jobs.planning.there import There
from planner.facts.kinds import format_world_size, get_num_slots
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count


def calibration_problems(owner: Any, spec: JobSpec, there: Iterable[There]) -> list[Problem]:
    """What keeps this job from measuring its host; nothing of a job that measures none. That there is no such host
    `jobs.planning.room` says. `there`: `hosts_there`."""
    if KINDS[spec.kind].result != "profile":
        return []
    if not may_change_hosts(owner):
        return [
            Problem(
                "kind",
                "`kind` is calibrate, but only staff who can change hosts can start a calibration. Ask staff.",
            )
        ]
    asked = spec.resources.host, spec.resources.device
    host = next((host for host in there if (host.name, host.device) == asked), None)
    if host is None:
        return []
    found = []
    if host.drained:
        found.append(
            Problem("resources.host", f"`resources.host` is {host.name}, which is drained. Undrain the host first.")
        )
    if Job.objects.filter(kind=spec.kind, wanted_host=host.name, status__in=LIVE).exists():
        found.append(
            Problem(
                "resources.host",
                f"A calibration of host {host.name} is already queued or running. Wait until the calibration ends.",
            )
        )
    if get_num_slots(spec) != host.slots:
        slots = format_count(host.slots, "slot")
        ranks = format_world_size(spec.layout)
        text = f"{ranks}, but a calibration of host {host.name} uses all {slots}. Set `layout.dp` to {host.slots}."
        found.append(Problem("layout", text))
    return found
