"""Collect the metrics of the board from the database and from the latest telemetry of running jobs.

The number of queries does not depend on the number of jobs, hosts, and ranks.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

from django.db.models import Count, F, Min, Q, Sum
from django.db.models.fields.json import KT
from django.utils import timezone
from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.core.redis_client import connect, read_latest_steps
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
from jobs.queue.hosts.presentation import CONTACT_STATES, get_contact_state
from jobs.queue.scheduling.snapshot import count_free_slots


class MetricFamily(NamedTuple):
    """A metric. The name contains the unit. A counter ends in `_total` and only increases within an attempt."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    words: str


def _gauge(name: str, words: str, *labels: str) -> MetricFamily:
    return MetricFamily(f"meshboard_{name}", "gauge", labels, words)


JOBS = _gauge("jobs", "Number of jobs, by status of the current attempt.", "status")
QUEUED_SLOTS = _gauge("queue_slots", "Total number of slots that queued jobs request.", "device")
OLDEST_WAIT = _gauge(
    "queue_oldest_wait_seconds", "Seconds that the oldest queued job has waited, except for held jobs."
)
PAUSED = _gauge("queue_paused", "1 while the queue is paused, otherwise 0.")
HOSTS = _gauge("hosts", "Number of hosts by state, except for removed hosts.", "state")
SLOTS = _gauge("slots", "Number of slots by state: used by attempts, free, or unavailable.", "device", "state")
HOST_SLOTS = _gauge("host_slots", "Number of slots of a host.", "host", "device")
HOST_SLOTS_HELD = _gauge("host_slots_held", "Number of slots of a host that attempts use.", "host")
HOST_HEARD = _gauge("host_last_heard_timestamp_seconds", "Unix time of the last contact with a host.", "host")
HOST_CPU = _gauge("host_cpu_utilization_ratio", "Recent CPU utilization of a host, from 0 to 1.", "host")
HOST_MEMORY = _gauge("host_memory_used_bytes", "Used memory of a host.", "host")
HOST_DISK = _gauge(
    "host_disk_free_bytes", "Free space on the disk of a host that stores runs or checkpoints.", "host", "use"
)
GPU_BUSY = _gauge("gpu_utilization_ratio", "Recent utilization of a GPU, from 0 to 1.", "host", "gpu")
GPU_MEMORY = _gauge("gpu_memory_used_bytes", "Used memory of a GPU.", "host", "gpu")
GPU_POWER = _gauge("gpu_power_watts", "Power draw of a GPU.", "host", "gpu")
GPU_HEAT = _gauge("gpu_temperature_celsius", "Temperature of a GPU.", "host", "gpu")
JOB = _gauge(
    "job_info",
    "Always 1 for a running job, with the job name and other properties as labels.",
    "job",
    "name",
    "project",
    "kind",
    "attempt",
)
VERDICT = _gauge(
    "job_verdict", "1 for the current verdict state of a running job, named by the label `verdict`.", "job", "verdict"
)
VERDICTS = _gauge("verdicts", "Number of running jobs by verdict state.", "verdict")
JOB_STEP = _gauge("job_step", "Number of completed steps in the current attempt of a running job.", "job")
JOB_TOKENS = _gauge(
    "job_tokens_per_second", "Tokens of the global batch divided by the latest step time of the slowest rank.", "job"
)
JOB_LOSS = _gauge("job_loss", "Mean loss of the latest step of a running job.", "job")
RANK_STEP = _gauge("rank_step_seconds", "Duration of the latest step of a rank.", "job", "rank")
RANK_BYTES = MetricFamily(
    "meshboard_rank_payload_bytes_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Exact number of payload bytes that a rank passed to collectives in training steps.",
)
RANK_CALLS = MetricFamily(
    "meshboard_rank_collectives_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Exact number of collectives that a rank called in training steps.",
)
TRIMMED = _gauge(
    "trimmed_series", "Number of running jobs and ranks that these metrics omit because of a limit.", "what"
)
TICKED = _gauge("process_last_tick_timestamp_seconds", "Unix time when the process last completed a tick.", "process")
DELIVERIES = _gauge("deliveries", "Number of stored webhook messages and emails, by outcome.", "way", "outcome")
DEAD_LETTERS = _gauge("dead_letters", "Number of events that failed and need the attention of staff.")
ORDERS = _gauge("orders_waiting", "Number of commands to hosts that wait to be sent.")

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, MetricFamily))
GPU_METRICS = tuple(family.name for family in FAMILIES if "gpu" in family.labels)

log = logging.getLogger(__name__)

MAX_AGE_S = 120  # ranks without a recent step are omitted
STREAMS_PER_READ = 8  # bounds the memory

Stream = tuple[str, int, int]  # job, attempt, node


@dataclass
class RankMetrics:
    """Latest step of a rank, and payload bytes and calls per axis in the phase "step"."""

    step: int = 0
    step_s: float = 0.0
    tokens: int = 0
    loss: float | None = None
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)


def summarize_ranks(items: Iterable[dict[str, Any]]) -> dict[int, RankMetrics]:
    """Return the metrics per rank from items in the order of their creation."""
    found: dict[int, RankMetrics] = {}
    for item in items:
        if item["kind"] not in ("step", "phase") or "cells" not in item:
            continue
        rank = found.setdefault(item["rank"], RankMetrics())
        axes: dict[str, tuple[int, int]] = {}
        for cell in item["cells"]:
            if cell["phase"] == "step":
                payload, calls = axes.get(cell["axis"], (0, 0))
                axes[cell["axis"]] = (payload + cell["payload_bytes"], calls + cell["count"])
        rank.axes = axes
        if item["kind"] == "step":
            rank.step, rank.step_s, rank.tokens = item["step"], item["step_s"], item["tokens"] or 0
            rank.loss = item["loss"]
        else:
            rank.step = item.get("steps", rank.step)
    return found


def read_rank_metrics(streams: Mapping[Stream, int]) -> dict[Stream, dict[int, RankMetrics]]:
    """Return the metrics of ranks with recent steps, none without Redis. `streams`: number of ranks per stream."""
    found: dict[Stream, dict[int, RankMetrics]] = {}
    places = list(streams)
    try:
        with connect() as client:
            for first in range(0, len(places), STREAMS_PER_READ):
                some = places[first : first + STREAMS_PER_READ]
                latest_steps = read_latest_steps(
                    client, {telemetry_stream(*one): streams[one] for one in some}, MAX_AGE_S
                )
                found |= {one: summarize_ranks(latest_steps[telemetry_stream(*one)]) for one in some}
    except (RedisError, OSError) as error:
        log.warning("Metrics omit ranks: %s", error)
    return found


MAX_JOBS = 100  # the latest
MAX_JOB_RANKS = 64  # the first ranks of a job
MAX_RANKS = 1024  # in total
MAX_HOSTS = 1000

Samples = dict[tuple[str, ...], float]
MetricSamples = dict[MetricFamily, Samples]


def collect_metrics() -> MetricSamples:
    """Return the value of each combination of labels, by metric."""
    found: MetricSamples = defaultdict(dict)
    _add_queue(found)
    _add_hosts(found)
    _add_running_jobs(found)
    _add_board(found)
    return {family: found[family] for family in FAMILIES if found.get(family)}


def _add_queue(found: MetricSamples) -> None:
    by_status = dict(Job.objects.order_by().values_list("status").annotate(Count("id")))
    found[JOBS] = {(status,): by_status.get(status, 0) for status in Status.values}
    queued = Job.objects.filter(status=Status.QUEUED).order_by()
    slots_by_device = dict(queued.values_list("device").annotate(Sum("num_slots")))
    found[QUEUED_SLOTS] = {(device,): slots_by_device.get(device, 0) for device in ("cpu", "cuda", *slots_by_device)}
    oldest = queued.filter(held=False).aggregate(first=Min("changed"))["first"]
    found[OLDEST_WAIT] = {(): max(0.0, (timezone.now() - oldest).total_seconds()) if oldest else 0.0}
    found[PAUSED] = {(): float(QueueState.objects.filter(paused=True).exists())}


def _add_hosts(found: MetricSamples) -> None:
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
        if number < MAX_HOSTS:
            _add_host(found, host, held)
    found[HOSTS] = {(state,): states[state] for state in CONTACT_STATES}
    devices = {"cpu", *(device for device, _ in slots)}
    found[SLOTS] = {
        (device, state): slots[device, state] for device in sorted(devices) for state in ("held", "free", "unusable")
    }


def _add_host(found: MetricSamples, host: Host, held: int) -> None:
    found[HOST_SLOTS][host.name, host.device] = host.slots
    found[HOST_SLOTS_HELD][(host.name,)] = held
    found[HOST_HEARD][(host.name,)] = host.last_seen.timestamp()
    use: dict[str, Any] = host.use or {}
    if "busy_percent" in use:
        found[HOST_CPU][(host.name,)] = use["busy_percent"] / 100
    if "memory_bytes" in use:
        found[HOST_MEMORY][(host.name,)] = use["memory_bytes"]
    for disk in use.get("disks", ()):
        found[HOST_DISK][host.name, disk["use"]] = disk["free_bytes"]
    for number, gpu in enumerate(use.get("gpus", ())):
        for family, name, scale in (
            (GPU_BUSY, "busy_percent", 0.01),
            (GPU_MEMORY, "memory_bytes", 1),
            (GPU_POWER, "watts", 1),
            (GPU_HEAT, "celsius", 1),
        ):
            if name in gpu:
                found[family][host.name, str(number)] = gpu[name] * scale


def _add_running_jobs(found: MetricSamples) -> None:
    running = Job.objects.filter(status__in=(Status.RUNNING, Status.UNREACHABLE)).order_by("-changed")
    jobs = {job.id: job for job in running.only("id", "name", "project", "kind", "attempt")[:MAX_JOBS]}
    total = sum(int(count) for (status,), count in found[JOBS].items() if status in ("running", "unreachable"))
    current = Attempt.objects.filter(job__in=running.order_by(), number=F("job__attempt"))
    verdicts = Counter[str]()
    for job_id, verdict in current.annotate(verdict=KT("diagnosis__state")).values_list("job_id", "verdict"):
        if verdict:
            verdicts[verdict] += 1
        if verdict and job_id in jobs:
            found[VERDICT][job_id, verdict] = 1
    found[VERDICTS] = {(state,): verdicts[state] for state in ("starting", "well", "notice", "slow", "hung", "failed")}
    for job in jobs.values():
        found[JOB][job.id, job.name, job.project, job.kind, str(job.attempt)] = 1
    left_out = _add_ranks(found, jobs)
    found[TRIMMED] = {("jobs",): max(0, total - len(jobs)), ("ranks",): left_out}


def _add_ranks(found: MetricSamples, jobs: dict[str, Job]) -> int:
    members = Member.objects.filter(attempt__job__in=list(jobs), attempt__number=F("attempt__job__attempt"))
    first = members.filter(first_rank__lt=MAX_JOB_RANKS).order_by("node")
    rows = first.values_list("attempt__job_id", "attempt__number", "node", "num_ranks")
    streams = {(job, number, node): ranks for job, number, node, ranks in rows}
    read = dict(islice(streams.items(), MAX_RANKS))
    left_out = (members.aggregate(ranks=Sum("num_ranks"))["ranks"] or 0) - sum(read.values())
    by_job: dict[str, dict[int, RankMetrics]] = defaultdict(dict)
    for (job, _, _), ranks in read_rank_metrics(read).items():
        by_job[job] |= ranks
    num_ranks = 0
    for job, ranks in by_job.items():
        _add_job(found, job, ranks)
        for rank, newest in sorted(ranks.items()):
            if rank >= MAX_JOB_RANKS or num_ranks >= MAX_RANKS:
                left_out += 1
                continue
            num_ranks += 1
            _add_rank(found, jobs[job], str(rank), newest)
    return left_out


def _add_job(found: MetricSamples, job: str, ranks: dict[int, RankMetrics]) -> None:
    furthest = max(ranks.values(), key=lambda rank: rank.step, default=None)
    if furthest is None:
        return
    found[JOB_STEP][(job,)] = furthest.step
    slowest_s = max(rank.step_s for rank in ranks.values() if rank.step == furthest.step)
    if slowest_s > 0:
        found[JOB_TOKENS][(job,)] = furthest.tokens / slowest_s
    losses = [rank.loss for rank in ranks.values() if rank.loss is not None and math.isfinite(rank.loss)]
    if losses:
        found[JOB_LOSS][(job,)] = losses[0]


def _add_rank(found: MetricSamples, job: Job, rank: str, newest: RankMetrics) -> None:
    if newest.step_s > 0:
        found[RANK_STEP][job.id, rank] = newest.step_s
    for axis, (payload, calls) in newest.axes.items():
        found[RANK_BYTES][job.id, str(job.attempt), rank, axis] = payload
        found[RANK_CALLS][job.id, str(job.attempt), rank, axis] = calls


def _add_board(found: MetricSamples) -> None:
    ticked = Lease.objects.filter(ticked__isnull=False).values_list("name", "ticked")
    found[TICKED] = {(name,): when.timestamp() for name, when in ticked if when is not None}
    by = Delivery.objects.order_by().values_list("outcome")
    ways = {"webhook": Q(webhook__isnull=False), "mail": Q(person__isnull=False)}
    counted = by.annotate(**{way: Count("id", filter=wanted) for way, wanted in ways.items()})
    found[DELIVERIES] = {(way, outcome): 0 for way in ways for outcome in Outcome.values}
    for outcome, *counts in counted.values_list("outcome", *ways):
        for way, count in zip(ways, counts, strict=True):
            found[DELIVERIES][way, outcome] = count
    found[DEAD_LETTERS] = {(): DeadLetter.objects.count()}
    found[ORDERS] = {(): Outbox.objects.count()}
