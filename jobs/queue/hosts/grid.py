"""Hosts as their pages show them: every slot with the colour of its job, and how each host fares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.models import Host, Job
from jobs.queue.hosts.slots import held_slots
from jobs.queue.hosts.state import HostState, speaks, state_of

COLOURS = 16  # as many as there are --series tokens
MOST_IN_LEGEND = 24
MOST_IN_FULL = 24  # hosts; of more, each shows its first gauges only
FIRST_GAUGES = 2
TONES: dict[HostState, str] = {"connected": "good", "drained": "warn", "silent": "warn", "lost": "bad"}


class SlotShown(NamedTuple):
    """`colour` is a class: free, closed (nobody's, on a host that takes no jobs), another user's, or one of the
    series."""

    number: int
    colour: str
    job: Job | None


class Gauge(NamedTuple):
    """A figure with its bounds: `value` of `most`, in words."""

    label: str
    value: float
    most: float
    words: str
    bad: bool = False


class HostShown(NamedTuple):
    """One host."""

    host: Host
    state: HostState
    tone: str
    slots: list[SlotShown]
    free: int
    gauges: list[Gauge]


class Entry(NamedTuple):
    """Of the legend."""

    job: Job
    colour: str
    slots: int


class Grid(NamedTuple):
    """All hosts, and the jobs on them; `more` jobs are coloured and not named, `foreign` slots are other users'."""

    hosts: list[HostShown]
    legend: list[Entry]
    more: int
    foreign: int
    free: int
    closed: int


def grid(hosts: Sequence[Host], user: Any, free: Mapping[int, int]) -> Grid:
    """As the user may see it. Colours are by job, the same on every host, and change with the jobs that run.

    `free`: by host, how many slots the queue could give away now.
    """
    held = held_slots(hosts, user)
    counts = Counter(slot.job.id for slots in held.values() for slot in slots if slot.job)
    jobs = {slot.job.id: slot.job for slots in held.values() for slot in slots if slot.job}
    order = sorted(jobs.values(), key=lambda job: (job.created, job.id))
    colours = {job.id: f"slot-{place % COLOURS}" for place, job in enumerate(order)}
    brief = len(hosts) > MOST_IN_FULL
    shown = [
        _shown(host, {slot.slot: slot.job for slot in held[host.pk]}, colours, free.get(host.pk, 0), brief=brief)
        for host in hosts
    ]
    legend = [Entry(job, colours[job.id], counts[job.id]) for job in order]
    return Grid(
        hosts=shown,
        legend=legend[:MOST_IN_LEGEND],
        more=max(0, len(legend) - MOST_IN_LEGEND),
        foreign=sum(slot.job is None for slots in held.values() for slot in slots),
        free=sum(one.free for one in shown),
        closed=sum(slot.colour == "slot-closed" for one in shown for slot in one.slots),
    )


def _shown(host: Host, held: dict[int, Job | None], colours: dict[str, str], free: int, *, brief: bool) -> HostShown:
    slots, unheld = [], "slot-free" if free else "slot-closed"
    for number in range(host.slots):
        job = held.get(number)
        colour = colours[job.id] if job else "slot-foreign" if number in held else unheld
        slots.append(SlotShown(number, colour, job))
    state = state_of(host)
    told = gauges(host)[: FIRST_GAUGES if brief else None] if speaks(host) else []  # once is not now
    return HostShown(host, state, TONES[state], slots, free, told)


def gauges(host: Host) -> list[Gauge]:
    """How it fared at its last heartbeat: its GPUs together, or its cores; then memory and disks."""
    use, facts = host.use or {}, host.facts or {}
    found = _of_gpus(use, facts) if use.get("gpus") else _of_cores(use, facts)
    for disk in use.get("disks", []):
        free, total = disk["free_bytes"], disk["total_bytes"]
        if total:
            words = f"{_gib(free)} free of {_gib(total)}"
            found.append(Gauge(f"Disk ({disk['use']})", total - free, total, words, free < total / 20))
    return found


def _of_gpus(use: dict[str, Any], facts: dict[str, Any]) -> list[Gauge]:
    gpus, found = use["gpus"], []
    busy = [gpu["busy_percent"] for gpu in gpus if "busy_percent" in gpu]
    if busy:
        found.append(Gauge("GPU", sum(busy) / len(busy), 100, f"{sum(busy) / len(busy):.0f}%"))
    total = sum(gpu["memory_bytes"] for gpu in facts.get("gpus", []))
    used = sum(gpu.get("memory_bytes", 0) for gpu in gpus)
    if total:
        found.append(Gauge("GPU memory", used, total, f"{_gib(used)} of {_gib(total)}"))
    if hot := [gpu["celsius"] for gpu in gpus if "celsius" in gpu]:
        found.append(Gauge("Hottest GPU", max(hot), 100, f"{max(hot):.0f} \N{DEGREE SIGN}C", max(hot) >= 90))
    if watts := [gpu["watts"] for gpu in gpus if "watts" in gpu]:
        found.append(Gauge("Power", 0, 0, f"{sum(watts):,.0f} W"))
    return found


def _of_cores(use: dict[str, Any], facts: dict[str, Any]) -> list[Gauge]:
    found = []
    if "busy_percent" in use:
        words = f"{use['busy_percent']:.0f}% of {facts['cores']} cores" if facts else f"{use['busy_percent']:.0f}%"
        found.append(Gauge("CPU", use["busy_percent"], 100, words))
    if "memory_bytes" in use and facts.get("memory_bytes"):
        used, total = use["memory_bytes"], facts["memory_bytes"]
        found.append(Gauge("Memory", used, total, f"{_gib(used)} of {_gib(total)}", used > total * 0.95))
    return found


def _gib(num_bytes: float) -> str:
    gib = num_bytes / 2**30
    return f"{gib / 1024:.1f} TiB" if gib >= 1024 else f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"
