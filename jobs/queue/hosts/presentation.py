"""Describe hosts and join tokens for pages and REST."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from django.core.paginator import Page, Paginator
from django.utils import timezone
from pydantic import Field
from typing_extensions import TypedDict

from contracts.hosts import HostFacts, HostUsage
from jobs.core.access import get_listable_jobs
from jobs.core.job_details import StoredByOlderVersion, Timestamp
from jobs.models import HOST_SILENT_AFTER, Host, Job, JoinToken, SlotAllocation
from jobs.queue.hosts import joining

ContactState = Literal["connected", "drained", "sick", "silent", "lost"]
CONTACT_STATES: tuple[ContactState, ...] = get_args(ContactState)
CONTACT_STATE_TONES: dict[ContactState, str] = {
    "connected": "good",
    "drained": "warn",
    "sick": "bad",
    "silent": "warn",
    "lost": "bad",
}
PAGE_SIZE = 100
NUM_COLORS = 16  # number of --series tokens in the style sheet
MAX_LEGEND_ENTRIES = 24
MAX_DETAILED_HOSTS = 24  # on pages with more hosts, each host shows only its first gauges
NUM_FIRST_GAUGES = 2


def get_contact_state(host: Host) -> ContactState:
    """Return the state of a host. `sick`: it starts no jobs. `lost`: staff marked it as lost after its last contact."""
    if host.last_seen < timezone.now() - HOST_SILENT_AFTER:
        return "lost" if host.given_up is not None and host.given_up > host.last_seen else "silent"
    if host.drained:
        return "drained"
    return "sick" if host.get_problem() else "connected"


def is_in_contact(host: Host) -> bool:
    return get_contact_state(host) in ("connected", "drained", "sick")


class SlotUse(NamedTuple):
    """A used slot. `job` is None if the user may not see the job."""

    slot: int
    job: Job | None


def list_held_slots(hosts: Iterable[Host], user: Any) -> dict[int, list[SlotUse]]:
    """Return the used slots by host: those of attempts, and those with live ranks according to connected hosts."""
    jobs_by_slot = {
        host.pk: {slot: job for job, _attempt, slots in host.holding for slot in slots if slot < host.slots}
        if is_in_contact(host)
        else {}
        for host in hosts
    }
    rows = SlotAllocation.objects.filter(host__in=jobs_by_slot)
    for key, slot, job in rows.values_list("host_id", "slot", "member__attempt__job_id"):
        jobs_by_slot[key][slot] = job
    ids = {job for slots in jobs_by_slot.values() for job in slots.values()}
    visible = {job.id: job for job in get_listable_jobs(user).filter(id__in=ids)}
    return {
        key: [SlotUse(slot, visible.get(job)) for slot, job in sorted(slots.items())]
        for key, slots in jobs_by_slot.items()
    }


class HostsPage(NamedTuple):
    """A page of a filtered list of hosts. `states` and `slots` count all hosts."""

    hosts: list[Host]
    page: Page[Host]
    states: dict[ContactState, int]
    slots: int


def paginate_hosts(words: str, state: str, page: str | None) -> HostsPage:
    """Return a page of the hosts with `words` in their name and this state ("": any)."""
    every = list(Host.objects.present().defer("facts", "use", "profile", "holding").order_by("name"))
    states = {host.pk: get_contact_state(host) for host in every}
    found = [host for host in every if words.lower() in host.name.lower() and state in ("", states[host.pk])]
    shown = Paginator(found, PAGE_SIZE).get_page(page)
    counts = Counter(states.values())
    return HostsPage(
        hosts=list(Host.objects.filter(pk__in=[host.pk for host in shown]).order_by("name")),
        page=shown,
        states={state: counts[state] for state in CONTACT_STATES if counts[state]},
        slots=sum(host.slots for host in every),
    )


class HostBrief(TypedDict):
    """A host that runs jobs."""

    name: str
    state: Annotated[
        ContactState,
        Field(
            description="`drained`: accepts no new jobs. `sick`: launches would fail. `silent`: no contact for 30 s. "
            "`lost`: marked as lost."
        ),
    ]
    device: str
    device_name: str
    slots: int
    free_slots: Annotated[int, Field(description="Number of slots that the queue can use now. 0 for a drained host.")]
    drained: bool
    note: Annotated[str, Field(description="Warning from the host, for example that jobs run as root.")]
    problem: Annotated[str, Field(description="Reason why the host is sick. Empty if the host can start jobs.")]
    last_seen: Timestamp
    joined: Annotated[Timestamp | None, Field(description="Time when the host joined.")]
    calibrated: Annotated[Timestamp | None, Field(description="Time of the last calibration of the host.")]


class OccupiedSlot(TypedDict):
    """A slot that is not free."""

    slot: int
    job: Annotated[str | None, Field(description="Id of the job that uses the slot. null if you cannot see the job.")]


class HostDetail(HostBrief):
    """A host with its slots, hardware, and load."""

    address: Annotated[
        str,
        Field(description="Address at which other hosts reach this host. Empty if unknown, or if you are not staff."),
    ]
    held: list[OccupiedSlot]
    facts: Annotated[
        HostFacts | StoredByOlderVersion | None,
        Field(description="Hardware that the host reported. Only staff see addresses and serial numbers."),
    ]
    use: Annotated[
        HostUsage | StoredByOlderVersion | None,
        Field(description="Load of the host at the last heartbeat. Only staff see file paths."),
    ]


class LostAttempts(TypedDict):
    """Number of attempts that were lost with a host."""

    lost: int


class JoinTokenDetail(TypedDict):
    """A join token, without its text."""

    id: int
    note: str
    created: Timestamp
    created_by: str
    expires: Timestamp
    most_uses: Annotated[
        int | None, Field(description="Maximum number of hosts that can join with the token. null: unlimited.")
    ]
    uses: int
    labels: Annotated[list[str], Field(description="Labels that a host gets when it joins with the token.")]
    last_used: Timestamp | None
    last_host: Annotated[str, Field(description="Last host that joined.")]
    problem: Annotated[str, Field(description="Reason why the token is invalid. Empty for a valid token.")]


class NewJoinToken(JoinTokenDetail):
    """A new join token with its text."""

    token: Annotated[
        str, Field(description="Text of the token, shown only once. Meshboard stores only a hash of the token.")
    ]


def serialize_host_brief(host: Host, free: int) -> HostBrief:
    """Serialize a host for a list. `free`: number of slots that the queue can use now."""
    return {
        "name": host.name,
        "state": get_contact_state(host),
        "device": host.device,
        "device_name": host.device_name,
        "slots": host.slots,
        "free_slots": free,
        "drained": host.drained,
        "note": host.note,
        "problem": host.get_problem(),
        "last_seen": host.last_seen.isoformat(),
        "joined": host.joined.isoformat() if host.joined else None,
        "calibrated": host.profiled.isoformat() if host.profiled else None,
    }


def serialize_host_detail(host: Host, user: Any, free: int) -> HostDetail:
    """Serialize a host without the jobs and internals that the user may not see."""
    facts, use = host.facts, host.use
    may_see = may_see_host_internals(user)
    if facts and not may_see:
        nics = [{**nic, "addresses": []} for nic in facts.get("nics", [])]
        facts = {**facts, "nics": nics, "gpus": [{**gpu, "uuid": ""} for gpu in facts.get("gpus", [])]}
    if use and not may_see:
        use = {**use, "disks": [{**disk, "path": ""} for disk in use.get("disks", [])]}
    return {
        **serialize_host_brief(host, free),
        "address": host.address if may_see else "",
        "held": [
            {"slot": slot, "job": job.id if job else None} for slot, job in list_held_slots([host], user)[host.pk]
        ],
        "facts": facts,
        "use": use,
    }


def may_see_host_internals(user: Any) -> bool:
    """Return whether the user may see addresses, paths, and serial numbers of hosts."""
    return bool(user.is_active and user.is_staff)


def serialize_token(token: JoinToken) -> JoinTokenDetail:
    return {
        "id": token.pk,
        "note": token.note,
        "created": token.created.isoformat(),
        "created_by": token.created_by,
        "expires": token.expires.isoformat(),
        "most_uses": token.most_uses,
        "uses": token.uses,
        "labels": token.labels,
        "last_used": token.last_used.isoformat() if token.last_used else None,
        "last_host": token.last_host,
        "problem": joining.explain_invalid_token(token),
    }


class SlotCell(NamedTuple):
    """A slot in the grid. `colour` is a CSS class for a series, or for free, closed, and other users' slots."""

    number: int
    colour: str
    job: Job | None


class Gauge(NamedTuple):
    """A value with its maximum, and as text."""

    label: str
    value: float
    most: float
    words: str
    bad: bool = False


class HostCard(NamedTuple):
    """A host in the grid."""

    host: Host
    state: ContactState
    tone: str
    slots: list[SlotCell]
    free: int
    gauges: list[Gauge]


class LegendEntry(NamedTuple):
    """A job with its color and number of slots."""

    job: Job
    colour: str
    slots: int


class HostGrid(NamedTuple):
    """Hosts and their jobs. `more`: jobs missing in the legend. `foreign`: slots of jobs that the user may not see."""

    hosts: list[HostCard]
    legend: list[LegendEntry]
    more: int
    foreign: int
    free: int
    closed: int


def build_grid(hosts: Sequence[Host], user: Any, free: Mapping[int, int]) -> HostGrid:
    """Build the grid of slots. A job has one color on all hosts, which can change when other jobs start or end.

    `free`: number of slots that the queue can use now, by host.
    """
    held = list_held_slots(hosts, user)
    visible = [use.job for slots in held.values() for use in slots if use.job]
    counts = Counter(job.id for job in visible)
    jobs = sorted({job.id: job for job in visible}.values(), key=lambda job: (job.created, job.id))
    colors = {job.id: f"slot-{place % NUM_COLORS}" for place, job in enumerate(jobs)}
    num_gauges = NUM_FIRST_GAUGES if len(hosts) > MAX_DETAILED_HOSTS else None
    cards = []
    for host in hosts:
        num_free, state = free.get(host.pk, 0), get_contact_state(host)
        cells = _build_cells(host, held[host.pk], colors, "slot-free" if num_free else "slot-closed")
        gauges = build_gauges(host)[:num_gauges] if is_in_contact(host) else []  # old values would mislead
        cards.append(HostCard(host, state, CONTACT_STATE_TONES[state], cells, num_free, gauges))
    return HostGrid(
        hosts=cards,
        legend=[LegendEntry(job, colors[job.id], counts[job.id]) for job in jobs[:MAX_LEGEND_ENTRIES]],
        more=max(0, len(jobs) - MAX_LEGEND_ENTRIES),
        foreign=sum(use.job is None for slots in held.values() for use in slots),
        free=sum(card.free for card in cards),
        closed=sum(cell.colour == "slot-closed" for card in cards for cell in card.slots),
    )


def _build_cells(host: Host, held: list[SlotUse], colors: dict[str, str], unused_color: str) -> list[SlotCell]:
    jobs = {use.slot: use.job for use in held}
    cells = []
    for number in range(host.slots):
        job = jobs.get(number)
        color = colors[job.id] if job else "slot-foreign" if number in jobs else unused_color
        cells.append(SlotCell(number, color, job))
    return cells


def build_gauges(host: Host) -> list[Gauge]:
    """Build the gauges of a host's last heartbeat: all GPUs or the CPU, then memory and disks."""
    use, facts = host.use or {}, host.facts or {}
    gauges = _build_gpu_gauges(use, facts) if use.get("gpus") else _build_cpu_gauges(use, facts)
    for disk in use.get("disks", []):
        free, total = disk["free_bytes"], disk["total_bytes"]
        if total:
            words = f"{_format_gib(free)} free of {_format_gib(total)}"
            gauges.append(Gauge(f"Disk ({disk['use']})", total - free, total, words, free < total / 20))
    return gauges


def _build_gpu_gauges(use: dict[str, Any], facts: dict[str, Any]) -> list[Gauge]:
    gpus, gauges = use["gpus"], []
    if busy := [gpu["busy_percent"] for gpu in gpus if "busy_percent" in gpu]:
        mean = sum(busy) / len(busy)
        gauges.append(Gauge("GPU", mean, 100, f"{mean:.0f}%"))
    if total := sum(gpu["memory_bytes"] for gpu in facts.get("gpus", [])):
        used = sum(gpu.get("memory_bytes", 0) for gpu in gpus)
        gauges.append(Gauge("GPU memory", used, total, f"{_format_gib(used)} of {_format_gib(total)}"))
    if hot := [gpu["celsius"] for gpu in gpus if "celsius" in gpu]:
        gauges.append(Gauge("Hottest GPU", max(hot), 100, f"{max(hot):.0f} \N{DEGREE SIGN}C", max(hot) >= 90))
    if watts := [gpu["watts"] for gpu in gpus if "watts" in gpu]:
        gauges.append(Gauge("Power", 0, 0, f"{sum(watts):,.0f} W"))
    return gauges


def _build_cpu_gauges(use: dict[str, Any], facts: dict[str, Any]) -> list[Gauge]:
    gauges = []
    if "busy_percent" in use:
        words = f"{use['busy_percent']:.0f}% of {facts['cores']} cores" if facts else f"{use['busy_percent']:.0f}%"
        gauges.append(Gauge("CPU", use["busy_percent"], 100, words))
    if "memory_bytes" in use and facts.get("memory_bytes"):
        used, total = use["memory_bytes"], facts["memory_bytes"]
        words = f"{_format_gib(used)} of {_format_gib(total)}"
        gauges.append(Gauge("Memory", used, total, words, used > total * 0.95))
    return gauges


def _format_gib(num_bytes: float) -> str:
    gib = num_bytes / 2**30
    return f"{gib / 1024:.1f} TiB" if gib >= 1024 else f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"
