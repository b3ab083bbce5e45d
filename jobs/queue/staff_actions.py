"""What staff do to the queue: each is one transaction, with its audit entry.

Who becomes a host, and what staff do to hosts: each with its entry of the audit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

import redis
from django.db import transaction
from django.utils import timezone

from contracts.hosts import JoinRequest, JoinResponse
from jobs.core.audit import record
from jobs.core.redis_client import connect
from jobs.models import Host, Job, JoinToken, Member, Pool, QueueState
from jobs.queue import lifecycle
from jobs.queue.hosts import joining
from jobs.queue.hosts.redis_access import NoRightsError, delete_user
from jobs.queue.scheduling.placement import sort_queue
from jobs.queue.scheduling.snapshot import QueueEntry, load_queue

Where = Literal["up", "down", "top"]
APART = 0.001  # points between a job that was moved and its neighbour
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000  # of a priority


def hold(jobs: Iterable[str], by: str) -> list[str]:
    """Queued jobs that start only once they are released; returns those that this call held."""
    return _set(jobs, by, "hold", held=True)


def release(jobs: Iterable[str], by: str) -> list[str]:
    """Undo `hold`; returns those that this call released."""
    return _set(jobs, by, "release", held=False)


def set_priority(jobs: Iterable[str], priority: int, by: str) -> list[str]:
    """Set the priority of queued jobs, and forget where they were moved; returns those whose priority this changed."""
    assert MIN_PRIORITY <= priority <= MAX_PRIORITY, "callers check the range of the priority"
    return _set(jobs, by, "priority", priority=priority, moved=0.0)


def _set(jobs: Iterable[str], by: str, what: str, **values: Any) -> list[str]:
    name = next(iter(values))
    changed = []
    with transaction.atomic():
        for job in lifecycle.lock_queued(jobs, *values):
            before = getattr(job, name)
            if before == values[name]:
                continue
            Job.objects.filter(id=job.id).update(**values)
            record(by, what, "job", job.id, before, values[name])
            changed.append(job.id)
        transaction.on_commit(lambda: lifecycle.announce(*changed))
    return changed


def move(job_id: str, where: Where, by: str) -> bool:
    """Past its neighbour of the same priority, or before all of them; True when this call did."""
    with transaction.atomic():
        queue = {queued.job.id: queued for queued in load_queue(timezone.now())}
        if job_id not in queue:
            return False
        mine = queue[job_id]
        peers = [
            queue[job.id] for job in sort_queue(q.job for q in queue.values()) if job.priority == mine.job.priority
        ]
        at = [peer.job.id for peer in peers].index(job_id)
        target = {"top": 0, "up": at - 1, "down": at + 1}[where]
        if target == at or not 0 <= target < len(peers):
            return False
        return _move_to(mine, [peer for peer in peers if peer is not mine], target, by)


def move_before(job_id: str, other_id: str, by: str) -> bool:
    """Right before another job of the same priority; True when this call did."""
    with transaction.atomic():
        queue = {queued.job.id: queued for queued in load_queue(timezone.now())}
        mine, other = queue.get(job_id), queue.get(other_id)
        if mine is None or other is None or mine is other or mine.job.priority != other.job.priority:
            return False
        peers = [
            queue[job.id] for job in sort_queue(q.job for q in queue.values()) if job.priority == mine.job.priority
        ]
        rest = [peer for peer in peers if peer is not mine]
        return _move_to(mine, rest, rest.index(other), by)


def _move_to(mine: QueueEntry, peers: list[QueueEntry], at: int, by: str) -> bool:
    """Give it the points that put it at a place among its peers: between its new neighbours where those lie apart,
    else those above it are raised as far as it takes.
    """
    below = peers[at].job.points if at < len(peers) else peers[-1].job.points - 2 * APART
    above = peers[at - 1].job.points if at else below + 2 * APART
    points = {mine.job.id: (above + below) / 2 if above - below > APART else below + APART}
    least = points[mine.job.id]
    for peer in reversed(peers[:at]):
        if peer.job.points >= least + APART / 2:
            break
        least += APART
        points[peer.job.id] = least
    before = {queued.job.id: queued.points for queued in (mine, *peers) if queued.job.id in points}
    if len(lifecycle.lock_queued(points)) != len(points):
        return False
    for job, wanted in points.items():
        moved = before[job].moved + wanted - sum(before[job])
        Job.objects.filter(id=job).update(moved=moved)
        record(by, "move" if job == mine.job.id else "move aside", "job", job, before[job].moved, moved)
    transaction.on_commit(lambda: lifecycle.announce(mine.job.id))
    return True


def pause_queue(paused: bool, by: str) -> bool:
    """Start nothing, or go on; True when this call changed it."""
    with transaction.atomic():
        state, _ = QueueState.objects.select_for_update().get_or_create(name="queue")
        if state.paused == paused:
            return False
        QueueState.objects.filter(pk=state.pk).update(paused=paused)
        record(by, "pause" if paused else "resume", "queue", "queue", state.paused, paused)
    return True


def pause_pool(pool: Pool, paused: bool, by: str) -> bool:
    """Its hosts take no new jobs, or do again; True when this call changed it."""
    with transaction.atomic():
        if not Pool.objects.filter(pk=pool.pk, paused=not paused).update(paused=paused):
            return False
        record(by, "pause" if paused else "resume", "pool", pool.name, not paused, paused)
    return True


log = logging.getLogger(__name__)


class BusyHostError(Exception):
    """It has attempts that have not ended."""

    def __init__(self, name: str, attempts: int) -> None:
        some = "an unfinished attempt" if attempts == 1 else f"{attempts} unfinished attempts"
        super().__init__(f"Host {name} still has {some}. Cancel the jobs, or mark the silent host as lost.")


def join_host(told: JoinRequest, address: str) -> tuple[JoinResponse, bool]:
    """What the machine needs, and whether it became the host just now rather than being it already.

    Raises:
        joining.TokenError, joining.NameTakenError, joining.UnreachableRedisError: nothing has changed.
        NoRightsError, redis.RedisError: it has joined, and asks again for the rest.
    """
    with transaction.atomic():
        host, new = joining.register_host(told, address)
        if new:
            record(host.name, "join", "host", host.name, after={"generation": host.generation, "labels": host.labels})
    return joining.create_join_response(host, address), new


def set_drained(host: Host, drained: bool, by: str) -> bool:
    """Take no new jobs, or take them again. True when this call changed it."""
    with transaction.atomic():
        changed = bool(Host.objects.filter(pk=host.pk, drained=not drained).update(drained=drained))
        if changed:
            record(by, "drain" if drained else "undrain", "host", host.name, not drained, drained)
    return changed


def remove_host(host: Host, by: str) -> None:
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
            delete_user(client, held)
    except (redis.RedisError, NoRightsError) as error:  # the controller does it, as soon as it can
        log.warning("Cannot delete the Redis user of host %s yet: %s", held.name, error)


def create_token(by: str, asked: joining.JoinTokenRequest) -> tuple[JoinToken, str]:
    """A new join token, and its text, which nobody sees again."""
    with transaction.atomic():
        token, text = joining.create_token(by, asked)
        record(by, "make", "join token", token.pk, after=asked.model_dump())
    return token, text


def revoke_token(token: JoinToken, by: str) -> bool:
    """True when this call did."""
    with transaction.atomic():
        revoked = joining.revoke_token(token)
        if revoked:
            record(by, "revoke", "join token", token.pk)
    return revoked
