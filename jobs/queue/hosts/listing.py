"""A page of the hosts: which are asked for, by name and state, and what all of them have."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from django.core.paginator import Page, Paginator

from jobs.models import Host
from jobs.queue.hosts.state import STATES, HostState, state_of

PAGE_SIZE = 100


class Listed(NamedTuple):
    """`states` counts all hosts that are there, whatever was asked for; so does `slots`."""

    hosts: list[Host]  # of the page, whole
    page: Page[Host]
    states: dict[HostState, int]
    slots: int


def listed(words: str, state: str, page: str | None) -> Listed:
    """Hosts with `words` in their name and in that state, "" for any; a page that is not there is the nearest one."""
    every = list(Host.objects.present().only("name", "slots", "last_seen", "given_up", "drained").order_by("name"))
    states = {host.pk: state_of(host) for host in every}
    found = [host for host in every if words.lower() in host.name.lower() and state in ("", states[host.pk])]
    shown = Paginator(found, PAGE_SIZE).get_page(page)
    counts = Counter(states.values())
    return Listed(
        hosts=list(Host.objects.filter(pk__in=[host.pk for host in shown]).order_by("name")),
        page=shown,
        states={state: counts[state] for state in STATES if counts[state]},
        slots=sum(host.slots for host in every),
    )
