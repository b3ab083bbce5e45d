"""How a host stands, in one word, the same on pages and over REST.

Which slots of which hosts are held, and by whose job as far as the user may know.

A page of the hosts: which are asked for, by name and state, and what all of them have.

Hosts and join tokens as JSON.

Hosts as their pages show them: every slot with the colour of its job, and how each host fares.
"""

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

ContactState = Literal["connected", "drained", "silent", "lost"]
CONTACT_STATES: tuple[ContactState, ...] = get_args(ContactState)


def get_contact_state(host: Host) -> ContactState:
    """`lost`: it fell silent, and staff gave it up; it is back as soon as it is heard."""
    if host.last_seen < timezone.now() - HOST_SILENT_AFTER:
        return "lost" if host.given_up is not None and host.given_up > host.last_seen else "silent"
    return "drained" if host.drained else "connected"


def is_in_contact(host: Host) -> bool:
    """Whether what it last said is of now."""
    return get_contact_state(host) in ("connected", "drained")


class SlotUse(NamedTuple):
    """A slot that is not free."""

    slot: int
    job: Job | None  # None: somebody else's


def list_held_slots(hosts: Iterable[Host], user: Any) -> dict[int, list[SlotUse]]:
    """By host, in the order of slots: those that attempts were given, and those that still live ones hold by the word
    of a host that speaks."""
    taken = {host.pk: _lived_on(host) for host in hosts}
    rows = SlotAllocation.objects.filter(host__in=taken)
    for key, slot, job in rows.values_list("host_id", "slot", "member__attempt__job_id"):
        taken[key][slot] = job
    ids = {job for slots in taken.values() for job in slots.values()}
    visible = {job.id: job for job in get_listable_jobs(user).filter(id__in=ids)}
    return {
        key: [SlotUse(slot, visible.get(job)) for slot, job in sorted(slots.items())] for key, slots in taken.items()
    }


def _lived_on(host: Host) -> dict[int, str]:
    if not is_in_contact(host):
        return {}
    return {slot: job for job, _attempt, slots in host.holding for slot in slots if slot < host.slots}


PAGE_SIZE = 100


class HostsPage(NamedTuple):
    """`states` counts all hosts that are there, whatever was asked for; so does `slots`."""

    hosts: list[Host]  # of the page, whole
    page: Page[Host]
    states: dict[ContactState, int]
    slots: int


def paginate_hosts(words: str, state: str, page: str | None) -> HostsPage:
    """Hosts with `words` in their name and in that state, "" for any; a page that is not there is the nearest one."""
    every = list(Host.objects.present().only("name", "slots", "last_seen", "given_up", "drained").order_by("name"))
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
    """Where jobs run."""

    name: str
    state: Annotated[
        ContactState,
        Field(description="`drained`: accepts no new jobs. `silent`: no contact for 30 s. `lost`: marked as lost."),
    ]
    device: str
    device_name: str
    slots: int
    free_slots: Annotated[int, Field(description="Number of slots that the queue can use now. 0 for a drained host.")]
    drained: bool
    note: Annotated[str, Field(description="Warning from the host, for example that jobs run as root.")]
    last_seen: Timestamp
    joined: Annotated[Timestamp | None, Field(description="Time when the host joined.")]
    calibrated: Annotated[Timestamp | None, Field(description="Time of the last calibration of the host.")]


class OccupiedSlot(TypedDict):
    """A slot that is not free."""

    slot: int
    job: Annotated[str | None, Field(description="Id of the job that uses the slot. null if you cannot see the job.")]


class HostDetail(HostBrief):
    """A host in full."""

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
    """How many attempts were lost with a host."""

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
    """A join token just made."""

    token: Annotated[
        str, Field(description="Text of the token, shown only once. Meshboard stores only a hash of the token.")
    ]


def serialize_host_brief(host: Host, free: int) -> HostBrief:
    """One line of a list; `free`: slots that the queue could give away now."""
    return {
        "name": host.name,
        "state": get_contact_state(host),
        "device": host.device,
        "device_name": host.device_name,
        "slots": host.slots,
        "free_slots": free,
        "drained": host.drained,
        "note": host.note,
        "last_seen": host.last_seen.isoformat(),
        "joined": host.joined.isoformat() if host.joined else None,
        "calibrated": host.profiled.isoformat() if host.profiled else None,
    }


def serialize_host_detail(host: Host, user: Any, free: int) -> HostDetail:
    """With the ids of those jobs that the user may see."""
    held: list[OccupiedSlot] = [
        {"slot": slot, "job": job.id if job else None} for slot, job in list_held_slots([host], user)[host.pk]
    ]
    inside = may_see_host_internals(user)
    return {
        **serialize_host_brief(host, free),
        "address": host.address if inside else "",
        "held": held,
        "facts": host.facts if inside or not host.facts else _outside(host.facts),
        "use": host.use if inside or not host.use else _without_paths(host.use),
    }


def may_see_host_internals(user: Any) -> bool:
    """Whether a user is told of a host's addresses, paths and serial numbers: what nobody needs to run a job there."""
    return bool(user.is_active and user.is_staff)


def _outside(facts: dict[str, Any]) -> dict[str, Any]:
    nics = [{**nic, "addresses": []} for nic in facts.get("nics", [])]
    return {**facts, "nics": nics, "gpus": [{**gpu, "uuid": ""} for gpu in facts.get("gpus", [])]}


def _without_paths(use: dict[str, Any]) -> dict[str, Any]:
    return {**use, "disks": [{**disk, "path": ""} for disk in use.get("disks", [])]}


def serialize_token(token: JoinToken) -> JoinTokenDetail:
    """For a list."""
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


COLOURS = 16  # as many as there are --series tokens
MAX_LEGEND_ENTRIES = 24
MOST_IN_FULL = 24  # hosts; of more, each shows its first gauges only
FIRST_GAUGES = 2
CONTACT_STATE_TONES: dict[ContactState, str] = {"connected": "good", "drained": "warn", "silent": "warn", "lost": "bad"}


class SlotCell(NamedTuple):
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


class HostCard(NamedTuple):
    """One host."""

    host: Host
    state: ContactState
    tone: str
    slots: list[SlotCell]
    free: int
    gauges: list[Gauge]


class LegendEntry(NamedTuple):
    """Of the legend."""

    job: Job
    colour: str
    slots: int


class HostGrid(NamedTuple):
    """All hosts, and the jobs on them; `more` jobs are coloured and not named, `foreign` slots are other users'."""

    hosts: list[HostCard]
    legend: list[LegendEntry]
    more: int
    foreign: int
    free: int
    closed: int


def build_grid(hosts: Sequence[Host], user: Any, free: Mapping[int, int]) -> HostGrid:
    """As the user may see it. Colours are by job, the same on every host, and change with the jobs that run.

    `free`: by host, how many slots the queue could give away now.
    """
    held = list_held_slots(hosts, user)
    counts = Counter(slot.job.id for slots in held.values() for slot in slots if slot.job)
    jobs = {slot.job.id: slot.job for slots in held.values() for slot in slots if slot.job}
    order = sorted(jobs.values(), key=lambda job: (job.created, job.id))
    colours = {job.id: f"slot-{place % COLOURS}" for place, job in enumerate(order)}
    brief = len(hosts) > MOST_IN_FULL
    shown = [
        _shown(host, {slot.slot: slot.job for slot in held[host.pk]}, colours, free.get(host.pk, 0), brief=brief)
        for host in hosts
    ]
    legend = [LegendEntry(job, colours[job.id], counts[job.id]) for job in order]
    return HostGrid(
        hosts=shown,
        legend=legend[:MAX_LEGEND_ENTRIES],
        more=max(0, len(legend) - MAX_LEGEND_ENTRIES),
        foreign=sum(slot.job is None for slots in held.values() for slot in slots),
        free=sum(one.free for one in shown),
        closed=sum(slot.colour == "slot-closed" for one in shown for slot in one.slots),
    )


def _shown(host: Host, held: dict[int, Job | None], colours: dict[str, str], free: int, *, brief: bool) -> HostCard:
    slots, unheld = [], "slot-free" if free else "slot-closed"
    for number in range(host.slots):
        job = held.get(number)
        colour = colours[job.id] if job else "slot-foreign" if number in held else unheld
        slots.append(SlotCell(number, colour, job))
    state = get_contact_state(host)
    told = build_gauges(host)[: FIRST_GAUGES if brief else None] if is_in_contact(host) else []  # once is not now
    return HostCard(host, state, CONTACT_STATE_TONES[state], slots, free, told)


def build_gauges(host: Host) -> list[Gauge]:
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
