"""What staff do to the queue: each is one transaction, with its audit entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from django.db import transaction
from django.utils import timezone

from jobs.core.audit import record
from jobs.models import Job, Pool, QueueState
from jobs.queue import lifecycle
from jobs.queue.scheduling.placement import in_order
from jobs.queue.scheduling.snapshot import Queued, queue_now

Where = Literal["up", "down", "top"]
APART = 0.001  # points between a job that was moved and its neighbour
LOWEST, HIGHEST = -1000, 1000  # of a priority


def hold(jobs: Iterable[str], by: str) -> list[str]:
    """Queued jobs that start only once they are released; returns those that this call held."""
    return _set(jobs, by, "hold", held=True)


def release(jobs: Iterable[str], by: str) -> list[str]:
    """Undo `hold`; returns those that this call released."""
    return _set(jobs, by, "release", held=False)


def prioritise(jobs: Iterable[str], priority: int, by: str) -> list[str]:
    """Set the priority of queued jobs, and forget where they were moved; returns those whose priority this changed."""
    assert LOWEST <= priority <= HIGHEST, "callers check the range of the priority"
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
        queue = {queued.job.id: queued for queued in queue_now(timezone.now())}
        if job_id not in queue:
            return False
        mine = queue[job_id]
        peers = [queue[job.id] for job in in_order(q.job for q in queue.values()) if job.priority == mine.job.priority]
        at = [peer.job.id for peer in peers].index(job_id)
        target = {"top": 0, "up": at - 1, "down": at + 1}[where]
        if target == at or not 0 <= target < len(peers):
            return False
        return _move_to(mine, [peer for peer in peers if peer is not mine], target, by)


def move_before(job_id: str, other_id: str, by: str) -> bool:
    """Right before another job of the same priority; True when this call did."""
    with transaction.atomic():
        queue = {queued.job.id: queued for queued in queue_now(timezone.now())}
        mine, other = queue.get(job_id), queue.get(other_id)
        if mine is None or other is None or mine is other or mine.job.priority != other.job.priority:
            return False
        peers = [queue[job.id] for job in in_order(q.job for q in queue.values()) if job.priority == mine.job.priority]
        rest = [peer for peer in peers if peer is not mine]
        return _move_to(mine, rest, rest.index(other), by)


def _move_to(mine: Queued, peers: list[Queued], at: int, by: str) -> bool:
    """Give it the points that put it at a place among its peers: between its new neighbours where those lie apart,
    else those above it are raised as far as it takes.
    """
    below = peers[at].job.standing if at < len(peers) else peers[-1].job.standing - 2 * APART
    above = peers[at - 1].job.standing if at else below + 2 * APART
    points = {mine.job.id: (above + below) / 2 if above - below > APART else below + APART}
    least = points[mine.job.id]
    for peer in reversed(peers[:at]):
        if peer.job.standing >= least + APART / 2:
            break
        least += APART
        points[peer.job.id] = least
    before = {queued.job.id: queued.standing for queued in (mine, *peers) if queued.job.id in points}
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
