"""Whether the connected hosts could hold a job if they were empty, and whether the host that it names exists."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.core.kinds import KINDS
from jobs.planning.there import There, slot_device
from planner.facts.kinds import SlotDemand, compute_slot_demand, format_world_size
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count

MOST_NAMED = 5


def room_problems(spec: JobSpec, there: Sequence[There], *, now: bool = False) -> list[Problem]:
    """Why not, with the arithmetic; nothing while no host of its device is known.

    `there`: as `hosts_there` has them. `now`: only those that take jobs now; one that is drained may be opened again,
    and a job can wait for it.
    """
    device, asked = slot_device(spec, there), compute_slot_demand(spec)
    models: dict[str, list[int]] = {}
    for host in there:
        if host.device == device and (host.takes if now else host.live):
            models.setdefault(host.device_name, []).append(host.slots)
    if not models or any(asked.get_best_unit(sizes) is not None for sizes in models.values()):
        return []
    return [
        Problem("layout", f"{format_world_size(spec.layout)}, but {_there(asked, device, models)}. Use fewer ranks.")
    ]


def host_problems(spec: JobSpec, there: Sequence[There]) -> list[Problem]:
    """Why a job waits for ever for the host that it names; nothing while no host of its device is known, but of a job
    that is nothing without one.

    `there`: as `hosts_there` has them.
    """
    wanted, device = spec.resources.host, slot_device(spec, there)
    if wanted is None or spec.resources.engine != "hosts":
        return []
    others = [host.name for host in there if host.device == device]
    if wanted in others:
        return []
    if found := next((host for host in there if host.name == wanted), None):
        return [
            Problem(
                "resources.host",
                f"`resources.host` is {wanted}, which has only {found.device} slots, but the job needs {device} slots.",
            )
        ]
    if not others and KINDS[spec.kind].result != "profile":
        return []
    return [
        Problem("resources.host", f"`resources.host` is {wanted!r}, but no such {device} host exists.{_others(others)}")
    ]


def _others(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f" Use {' or '.join(names) if len(names) <= 2 else ', '.join(names[:MOST_NAMED])}{more}."


def _there(asked: SlotDemand, device: str, models: dict[str, list[int]]) -> str:
    largest = max(max(sizes) for sizes in models.values())
    unit = min(asked.units)
    most = max(asked.get_max_slots(sizes, unit) for sizes in models.values())
    several = max(len(sizes) for sizes in models.values()) > 1 and asked.max_hosts != 1
    whole = f"the largest {device.upper()} host has {format_count(largest, 'slot')}"
    if not several:
        return whole
    if unit > largest:
        return f"a tensor-parallel group of {unit} ranks needs to be on one host, and {whole}"
    hosts = f"at most {format_count(asked.max_hosts, f'{device} host')}" if asked.max_hosts else f"{device} hosts"
    parts = f" in multiples of {unit}" if unit > 1 else ""
    return f"{hosts} of the same hardware model have {format_count(most, 'slot')} in total{parts}"
