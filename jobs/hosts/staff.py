"""What staff may do to a host beside giving it up."""

from __future__ import annotations

import logging

import redis
from django.db import transaction
from django.utils import timezone

from jobs.connection import connect
from jobs.hosts.access import NoRightsError, dismiss
from jobs.models import Host, Member

log = logging.getLogger(__name__)


class BusyHostError(Exception):
    """It has attempts that have not ended."""

    def __init__(self, name: str, attempts: int) -> None:
        some = "an attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"{name} has {some} that did not end: cancel them, or give the host up while it is silent")


def drain(host: Host, drained: bool) -> bool:
    """Take no new jobs, or take them again. True when this call changed it."""
    return bool(Host.objects.filter(pk=host.pk, drained=not drained).update(drained=drained))


def remove(host: Host, by: str) -> None:
    """Nobody speaks as this host any more until a machine joins under its name anew.

    Raises:
        BusyHostError: something of it still runs, as far as the board knows.
    """
    with transaction.atomic():
        held = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        live = Member.objects.filter(host=held, ended=None).count()
        if live:
            raise BusyHostError(held.name, live)
        Host.objects.filter(pk=held.pk, removed=None).update(removed=timezone.now(), drained=True)
    log.info("host %s was removed by %s", held.name, by)
    try:
        with connect() as client:
            dismiss(client, held)
    except (redis.RedisError, NoRightsError) as error:  # the controller does it, as soon as it can
        log.warning("the Redis user of %s is not gone yet: %s", held.name, error)
