"""Every figure as it stands now, in so many queries however many jobs, hosts and ranks there are."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import islice
from typing import Any

from django.db.models import Count, F, Min, Q, Sum
from django.db.models.fields.json import KT
from django.utils import timezone

from jobs.models import (
    Attempt,
    DeadLetter,
    Delivery,
    Host,
    Job,
    Lease,
    Member,
    Outbox,
    Outcome,
    QueueState,
    SlotAllocation,
    Status,
)
from jobs.operations.metrics import catalogue as of
from jobs.operations.metrics.catalogue import Family
from jobs.operations.metrics.ranks import Newest, of_streams
from jobs.queue.hosts.presentation import get_contact_state
from jobs.queue.scheduling.snapshot import count_free_slots

MOST_JOBS = 100  # told of one by one, those that began last
MOST_RANKS = 64  # of a job, its first
MOST_RANKS_TOLD = 1024  # of all jobs
MOST_HOSTS = 1000

Samples = dict[tuple[str, ...], float]
Figures = dict[Family, Samples]


def figures() -> Figures:
    """By family, the value of each combination of its labels."""
    found: Figures = defaultdict(dict)
    _queue(found)
    _hosts(found)
    _running(found)
    _ourselves(found)
    return {family: found[family] for family in of.FAMILIES if found.get(family)}


def _queue(found: Figures) -> None:
    by_status = dict(Job.objects.order_by().values_list("status").annotate(Count("id")))
    found[of.JOBS] = {(status,): by_status.get(status, 0) for status in Status.values}
    queued = Job.objects.filter(status=Status.QUEUED).order_by()
    asked = dict(queued.values_list("device").annotate(Sum("num_slots")))
    found[of.QUEUED_SLOTS] = {(device,): asked.get(device, 0) for device in ("cpu", "cuda", *asked)}
    oldest = queued.filter(held=False).aggregate(first=Min("changed"))["first"]
    found[of.OLDEST_WAIT] = {(): max(0.0, (timezone.now() - oldest).total_seconds()) if oldest else 0.0}
    found[of.PAUSED] = {(): float(QueueState.objects.filter(paused=True).exists())}


def _hosts(found: Figures) -> None:
    held_of = dict(SlotAllocation.objects.order_by().values_list("host").annotate(Count("id")))
    hosts, free_of = Host.objects.present().order_by("name"), count_free_slots()
    states, slots = Counter[str](), Counter[tuple[str, str]]()
    for number, host in enumerate(hosts.defer("facts", "profile", "holding")):
        state, held = get_contact_state(host), min(held_of.get(host.pk, 0), host.slots)
        states[state] += 1
        slots[host.device, "held"] += held
        free = min(free_of.get(host.pk, 0), host.slots - held)
        slots[host.device, "free"] += free
        slots[host.device, "unusable"] += host.slots - held - free
        if number < MOST_HOSTS:
            _host(found, host, held)
    found[of.HOSTS] = {(state,): states[state] for state in ("connected", "drained", "silent", "lost")}
    devices = {"cpu", *(device for device, _ in slots)}
    found[of.SLOTS] = {
        (device, state): slots[device, state] for device in sorted(devices) for state in ("held", "free", "unusable")
    }


def _host(found: Figures, host: Host, held: int) -> None:
    found[of.HOST_SLOTS][host.name, host.device] = host.slots
    found[of.HOST_SLOTS_HELD][(host.name,)] = held
    found[of.HOST_HEARD][(host.name,)] = host.last_seen.timestamp()
    use: dict[str, Any] = host.use or {}
    if "busy_percent" in use:
        found[of.HOST_CPU][(host.name,)] = use["busy_percent"] / 100
    if "memory_bytes" in use:
        found[of.HOST_MEMORY][(host.name,)] = use["memory_bytes"]
    for disk in use.get("disks", ()):
        found[of.HOST_DISK][host.name, disk["use"]] = disk["free_bytes"]
    for number, gpu in enumerate(use.get("gpus", ())):
        for family, name, scale in (
            (of.GPU_BUSY, "busy_percent", 0.01),
            (of.GPU_MEMORY, "memory_bytes", 1),
            (of.GPU_POWER, "watts", 1),
            (of.GPU_HEAT, "celsius", 1),
        ):
            if name in gpu:
                found[family][host.name, str(number)] = gpu[name] * scale


def _running(found: Figures) -> None:
    running = Job.objects.filter(status__in=(Status.RUNNING, Status.UNREACHABLE)).order_by("-changed")
    jobs = {job.id: job for job in running.only("id", "name", "project", "kind", "attempt")[:MOST_JOBS]}
    total = sum(int(count) for (status,), count in found[of.JOBS].items() if status in ("running", "unreachable"))
    current = Attempt.objects.filter(job__in=running.order_by(), number=F("job__attempt"))
    verdicts = Counter[str]()
    for job_id, verdict in current.annotate(verdict=KT("diagnosis__state")).values_list("job_id", "verdict"):
        if verdict:
            verdicts[verdict] += 1
        if verdict and job_id in jobs:
            found[of.VERDICT][job_id, verdict] = 1
    found[of.VERDICTS] = {
        (state,): verdicts[state] for state in ("starting", "well", "notice", "slow", "hung", "failed")
    }
    for job in jobs.values():
        found[of.JOB][job.id, job.name, job.project, job.kind, str(job.attempt)] = 1
    left_out = _ranks(found, jobs)
    found[of.TRIMMED] = {("jobs",): max(0, total - len(jobs)), ("ranks",): left_out}


def _ranks(found: Figures, jobs: dict[str, Job]) -> int:
    """Returns how many ranks were left out."""
    members = Member.objects.filter(attempt__job__in=list(jobs), attempt__number=F("attempt__job__attempt"))
    first = members.filter(first_rank__lt=MOST_RANKS).order_by("node")
    rows = first.values_list("attempt__job_id", "attempt__number", "node", "num_ranks")
    streams = {(job, number, node): ranks for job, number, node, ranks in rows}
    read = dict(islice(streams.items(), MOST_RANKS_TOLD))
    left_out = (members.aggregate(ranks=Sum("num_ranks"))["ranks"] or 0) - sum(read.values())
    by_job: dict[str, dict[int, Newest]] = defaultdict(dict)
    for (job, _, _), ranks in of_streams(read).items():
        by_job[job] |= ranks
    told = 0
    for job, ranks in by_job.items():
        _job(found, job, ranks)
        for rank, newest in sorted(ranks.items()):
            if rank >= MOST_RANKS or told >= MOST_RANKS_TOLD:
                left_out += 1
                continue
            told += 1
            _rank(found, jobs[job], str(rank), newest)
    return left_out


def _job(found: Figures, job: str, ranks: dict[int, Newest]) -> None:
    furthest = max(ranks.values(), key=lambda rank: rank.step, default=None)
    if furthest is None:
        return
    found[of.JOB_STEP][(job,)] = furthest.step
    slowest_s = max(rank.step_s for rank in ranks.values() if rank.step == furthest.step)
    if slowest_s > 0:
        found[of.JOB_TOKENS][(job,)] = furthest.tokens / slowest_s
    losses = [rank.loss for rank in ranks.values() if rank.loss is not None and math.isfinite(rank.loss)]
    if losses:
        found[of.JOB_LOSS][(job,)] = losses[0]


def _rank(found: Figures, job: Job, rank: str, newest: Newest) -> None:
    if newest.step_s > 0:
        found[of.RANK_STEP][job.id, rank] = newest.step_s
    for axis, (payload, calls) in newest.axes.items():
        found[of.RANK_BYTES][job.id, str(job.attempt), rank, axis] = payload
        found[of.RANK_CALLS][job.id, str(job.attempt), rank, axis] = calls


def _ourselves(found: Figures) -> None:
    ticked = Lease.objects.filter(ticked__isnull=False).values_list("name", "ticked")
    found[of.TICKED] = {(name,): when.timestamp() for name, when in ticked if when is not None}
    by = Delivery.objects.order_by().values_list("outcome")
    ways = {"webhook": Q(webhook__isnull=False), "mail": Q(person__isnull=False)}
    counted = by.annotate(**{way: Count("id", filter=wanted) for way, wanted in ways.items()})
    found[of.DELIVERIES] = {(way, outcome): 0 for way in ways for outcome in Outcome.values}
    for outcome, *counts in counted.values_list("outcome", *ways):
        for way, count in zip(ways, counts, strict=True):
            found[of.DELIVERIES][way, outcome] = count
    found[of.DEAD_LETTERS] = {(): DeadLetter.objects.count()}
    found[of.ORDERS] = {(): Outbox.objects.count()}
