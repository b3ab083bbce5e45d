"""Change the queue and hosts as staff. Each action is one transaction with its audit entry."""

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

log = logging.getLogger(__name__)

Where = Literal["up", "down", "top"]
POINTS_BETWEEN_JOBS = 0.001  # between a moved job and its neighbor
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000


class BusyHostError(Exception):
    """A host with unended attempts cannot be removed."""

    def __init__(self, name: str, attempts: int) -> None:
        some = "an unfinished attempt" if attempts == 1 else f"{attempts} unfinished attempts"
        super().__init__(f"Host {name} still has {some}. Cancel the jobs, or mark the silent host as lost.")


def hold(jobs: Iterable[str], by: str) -> list[str]:
    """Hold queued jobs until they are released, and return the changed jobs."""
    return _set(jobs, by, "hold", held=True)


def release(jobs: Iterable[str], by: str) -> list[str]:
    """Release held jobs, and return the changed jobs."""
    return _set(jobs, by, "release", held=False)


def set_priority(jobs: Iterable[str], priority: int, by: str) -> list[str]:
    """Set the priority of queued jobs, reset their moves, and return the changed jobs."""
    assert MIN_PRIORITY <= priority <= MAX_PRIORITY, "callers check the range of the priority"
    return _set(jobs, by, "priority", priority=priority, moved=0.0)


def _set(jobs: Iterable[str], by: str, action: str, **values: Any) -> list[str]:
    name = next(iter(values))
    changed = []
    with transaction.atomic():
        for job in lifecycle.lock_queued(jobs, *values):
            before = getattr(job, name)
            if before == values[name]:
                continue
            Job.objects.filter(id=job.id).update(**values)
            record(by, action, "job", job.id, before, values[name])
            changed.append(job.id)
        transaction.on_commit(lambda: lifecycle.announce(*changed))
    return changed


def move(job_id: str, where: Where, by: str) -> bool:
    """Move a job among jobs of equal priority, and return whether it moved."""
    with transaction.atomic():
        queue = _load_queue_by_id()
        if job_id not in queue:
            return False
        peers = _list_peers(queue, queue[job_id])
        at = [peer.job.id for peer in peers].index(job_id)
        target = {"top": 0, "up": at - 1, "down": at + 1}[where]
        if target == at or not 0 <= target < len(peers):
            return False
        return _move_to(peers.pop(at), peers, target, by)


def move_before(job_id: str, other_id: str, by: str) -> bool:
    """Move a job right before another job of equal priority, and return whether it moved."""
    with transaction.atomic():
        queue = _load_queue_by_id()
        entry, other = queue.get(job_id), queue.get(other_id)
        if entry is None or other is None or entry is other or entry.job.priority != other.job.priority:
            return False
        peers = [peer for peer in _list_peers(queue, entry) if peer is not entry]
        return _move_to(entry, peers, peers.index(other), by)


def _load_queue_by_id() -> dict[str, QueueEntry]:
    return {entry.job.id: entry for entry in load_queue(timezone.now())}


def _list_peers(queue: dict[str, QueueEntry], entry: QueueEntry) -> list[QueueEntry]:
    """List the entries of equal priority in scheduling order."""
    jobs = sort_queue(other.job for other in queue.values() if other.job.priority == entry.job.priority)
    return [queue[job.id] for job in jobs]


def _move_to(entry: QueueEntry, peers: list[QueueEntry], at: int, by: str) -> bool:
    """Give a job points between its new neighbors. If these are too close, raise the jobs above it as needed."""
    below = peers[at].job.points if at < len(peers) else peers[-1].job.points - 2 * POINTS_BETWEEN_JOBS
    above = peers[at - 1].job.points if at else below + 2 * POINTS_BETWEEN_JOBS
    is_gap = above - below > POINTS_BETWEEN_JOBS
    least = (above + below) / 2 if is_gap else below + POINTS_BETWEEN_JOBS
    points = {entry.job.id: least}
    for peer in reversed(peers[:at]):
        if peer.job.points >= least + POINTS_BETWEEN_JOBS / 2:
            break
        least += POINTS_BETWEEN_JOBS
        points[peer.job.id] = least
    before = {other.job.id: other.points for other in (entry, *peers) if other.job.id in points}
    if len(lifecycle.lock_queued(points)) != len(points):
        return False
    for job, wanted in points.items():
        moved = before[job].moved + wanted - sum(before[job])
        Job.objects.filter(id=job).update(moved=moved)
        record(by, "move" if job == entry.job.id else "move aside", "job", job, before[job].moved, moved)
    transaction.on_commit(lambda: lifecycle.announce(entry.job.id))
    return True


def pause_queue(paused: bool, by: str) -> bool:
    """Pause or resume the queue, and return whether this changed it."""
    with transaction.atomic():
        state, _ = QueueState.objects.select_for_update().get_or_create(name="queue")
        if state.paused == paused:
            return False
        QueueState.objects.filter(pk=state.pk).update(paused=paused)
        record(by, "pause" if paused else "resume", "queue", "queue", state.paused, paused)
    return True


def pause_pool(pool: Pool, paused: bool, by: str) -> bool:
    """Pause or resume a pool, and return whether this changed it."""
    with transaction.atomic():
        if not Pool.objects.filter(pk=pool.pk, paused=not paused).update(paused=paused):
            return False
        record(by, "pause" if paused else "resume", "pool", pool.name, not paused, paused)
    return True


def join_host(request: JoinRequest, address: str) -> tuple[JoinResponse, bool]:
    """Return the response to a join request, and whether the machine became a host just now.

    Raises:
        joining.TokenError, joining.NameTakenError, joining.UnreachableRedisError: The machine did not join.
        NoRightsError, redis.RedisError: The machine joined, and must send the request again.
    """
    with transaction.atomic():
        host, is_new = joining.register_host(request, address)
        if is_new:
            record(host.name, "join", "host", host.name, after={"generation": host.generation, "labels": host.labels})
    return joining.create_join_response(host, address), is_new


def set_drained(host: Host, drained: bool, by: str) -> bool:
    """Drain a host or undo that, and return whether this changed it."""
    with transaction.atomic():
        changed = bool(Host.objects.filter(pk=host.pk, drained=not drained).update(drained=drained))
        if changed:
            record(by, "drain" if drained else "undrain", "host", host.name, not drained, drained)
    return changed


def remove_host(host: Host, by: str) -> None:
    """Remove a host until a machine joins with its name again.

    Raises:
        BusyHostError: The host has unended attempts.
    """
    with transaction.atomic():
        locked = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        if unended := Member.objects.filter(host=locked, ended=None).count():
            raise BusyHostError(locked.name, unended)
        if Host.objects.filter(pk=locked.pk, removed=None).update(removed=timezone.now(), drained=True):
            record(by, "remove", "host", locked.name)
    try:
        with connect() as client:
            delete_user(client, locked)
    except (redis.RedisError, NoRightsError) as error:  # the controller tries again
        log.warning("Cannot delete the Redis user of host %s yet: %s", locked.name, error)


def create_token(by: str, request: joining.JoinTokenRequest) -> tuple[JoinToken, str]:
    """Create a join token, and return it with its text, which is not stored."""
    with transaction.atomic():
        token, text = joining.create_token(by, request)
        record(by, "make", "join token", token.pk, after=request.model_dump())
    return token, text


def revoke_token(token: JoinToken, by: str) -> bool:
    """Revoke a join token, and return whether this changed it."""
    with transaction.atomic():
        revoked = joining.revoke_token(token)
        if revoked:
            record(by, "revoke", "join token", token.pk)
    return revoked
