"""Who becomes a host, and what staff do to hosts: each with its entry of the audit."""

from __future__ import annotations

import logging

import redis
from django.db import transaction
from django.utils import timezone

from contracts.hosts import JoinRequest, JoinResponse
from jobs.core.audit import record
from jobs.core.redis_connection import connect
from jobs.models import Host, JoinToken, Member
from jobs.queue.hosts import joining, tokens
from jobs.queue.hosts.access import NoRightsError, dismiss

log = logging.getLogger(__name__)


class BusyHostError(Exception):
    """It has attempts that have not ended."""

    def __init__(self, name: str, attempts: int) -> None:
        some = "an unfinished attempt" if attempts == 1 else f"{attempts} unfinished attempts"
        super().__init__(f"Host {name} still has {some}. Cancel the jobs, or mark the silent host as lost.")


def join(told: JoinRequest, address: str) -> tuple[JoinResponse, bool]:
    """What the machine needs, and whether it became the host just now rather than being it already.

    Raises:
        tokens.TokenError, joining.NameTakenError, joining.UnreachableRedisError: nothing has changed.
        NoRightsError, redis.RedisError: it has joined, and asks again for the rest.
    """
    with transaction.atomic():
        host, new = joining.become(told, address)
        if new:
            record(host.name, "join", "host", host.name, after={"generation": host.generation, "labels": host.labels})
    return joining.equip(host, address), new


def drain(host: Host, drained: bool, by: str) -> bool:
    """Take no new jobs, or take them again. True when this call changed it."""
    with transaction.atomic():
        changed = bool(Host.objects.filter(pk=host.pk, drained=not drained).update(drained=drained))
        if changed:
            record(by, "drain" if drained else "undrain", "host", host.name, not drained, drained)
    return changed


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
        if Host.objects.filter(pk=held.pk, removed=None).update(removed=timezone.now(), drained=True):
            record(by, "remove", "host", held.name)
    try:
        with connect() as client:
            dismiss(client, held)
    except (redis.RedisError, NoRightsError) as error:  # the controller does it, as soon as it can
        log.warning("Cannot delete the Redis user of host %s yet: %s", held.name, error)


def make_token(by: str, asked: tokens.TokenQuery) -> tuple[JoinToken, str]:
    """A new join token, and its text, which nobody sees again."""
    with transaction.atomic():
        token, text = tokens.mint(by, asked)
        record(by, "make", "join token", token.pk, after=asked.model_dump())
    return token, text


def revoke_token(token: JoinToken, by: str) -> bool:
    """True when this call did."""
    with transaction.atomic():
        revoked = tokens.revoke(token)
        if revoked:
            record(by, "revoke", "join token", token.pk)
    return revoked
