"""Whether the hosts that are connected could hold a job, were they empty."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.planning.there import There
from planner.facts.gang import Demand, demand
from planner.facts.kinds import product_words
from planner.facts.spec import JobSpec, Problem


def room_problems(spec: JobSpec, there: Iterable[There], *, now: bool = False) -> list[Problem]:
    """Why not, with the arithmetic; nothing while no host of its device is known.

    `there`: as `hosts_there` has them. `now`: only those that take jobs now; one that is drained may be opened again,
    and a job can wait for it.
    """
    device, asked = spec.resources.device, demand(spec)
    models: dict[str, list[int]] = {}
    for host in there:
        if host.live and not (now and host.drained):
            models.setdefault(host.device_name, []).append(host.slots)
    if not models or any(asked.unit_on(sizes) is not None for sizes in models.values()):
        return []
    return [Problem("layout", f"{product_words(spec.layout)}, but {_there(asked, device, models)}")]


def _there(asked: Demand, device: str, models: dict[str, list[int]]) -> str:
    largest = max(max(sizes) for sizes in models.values())
    unit = min(asked.units)
    most = max(asked.most(sizes, unit) for sizes in models.values())
    several = max(len(sizes) for sizes in models.values()) > 1 and asked.max_hosts != 1
    if not several:
        return f"the largest {device} host has {largest} slots"
    if unit > largest:
        return f"a tensor-parallel group of {unit} stays on one host, and the largest {device} host has {largest} slots"
    hosts = f"at most {asked.max_hosts} {device} hosts" if asked.max_hosts else f"the {device} hosts"
    parts = f" in multiples of {unit}" if unit > 1 else ""
    return f"{hosts} of one model have {most} slots together{parts}"
