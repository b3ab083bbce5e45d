"""The newest benchmarks of a collective: results, captured tensors, and wrong elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from django.db.models import F, Q, QuerySet

from jobs.models import Attempt, Host, Job, Status
from jobs.queue.attempt_completion import checked_result
from planner.facts.collectives import LabPoint, LabResult, LabStep
from planner.facts.spec import LabPrimitive

DEFAULT_RANKS = 4


class Measured(NamedTuple):
    """The results of a collective in a successful run."""

    attempt: Attempt
    result: LabResult
    points: list[LabPoint]


class Captured(NamedTuple):
    """The tensors of a collective in a successful run."""

    attempt: Attempt
    result: LabResult
    step: LabStep


class Wrong(NamedTuple):
    """A failed run with wrong elements of the collective."""

    attempt: Attempt
    wrong: int
    checked: int


class Newest(NamedTuple):
    """The newest runs of each kind. `wrong` is newer than `measured`."""

    measured: Measured | None
    captured: Captured | None
    wrong: Wrong | None


def newest(jobs: QuerySet[Job], primitive: LabPrimitive) -> Newest:
    """Return the newest benchmarks of a collective among `jobs`."""
    labs = Attempt.objects.filter(_has(primitive), job__in=jobs.filter(kind="lab"), number=F("job__attempt"))
    told = labs.select_related("job").order_by("-job__changed")
    measured = next(_measured(told.filter(job__status=Status.SUCCEEDED), primitive), None)
    failed = told.filter(job__status=Status.FAILED)
    if measured is not None:
        failed = failed.filter(job__changed__gt=measured.attempt.job.changed)
    return Newest(
        measured,
        next(_captured(told.filter(job__status=Status.SUCCEEDED), primitive), None),
        next(_wrong(failed, primitive), None),
    )


def _has(primitive: LabPrimitive) -> Q:
    """Match specs that name the collective or no collective. Only PostgreSQL has `contains` for JSON, so match text."""
    names = "job__spec__lab__primitives"
    return Q(**{f"{names}__icontains": f'"{primitive}"'}) | Q(**{f"{names}__isnull": True})


def _results(attempts: QuerySet[Attempt]) -> Iterator[tuple[Attempt, LabResult]]:
    told = attempts.filter(exit__summary__lab__isnull=False)
    for attempt in told.iterator(chunk_size=1):  # usually the first one matches, and an exit report is large
        result = checked_result(((attempt.exit or {}).get("summary") or {}).get("lab"))
        if result is not None:
            yield attempt, result


def _points(result: LabResult, primitive: LabPrimitive) -> list[LabPoint]:
    return [point for point in result.points if point.primitive == primitive]


def _measured(attempts: QuerySet[Attempt], primitive: LabPrimitive) -> Iterator[Measured]:
    for attempt, result in _results(attempts):
        if points := _points(result, primitive):
            yield Measured(attempt, result, points)


def _captured(attempts: QuerySet[Attempt], primitive: LabPrimitive) -> Iterator[Captured]:
    for attempt, result in _results(attempts.exclude(exit__summary__lab__steps=[])):
        for step in result.steps:
            if step.primitive == primitive:
                yield Captured(attempt, result, step)


def _wrong(attempts: QuerySet[Attempt], primitive: LabPrimitive) -> Iterator[Wrong]:
    for attempt, result in _results(attempts):
        points = _points(result, primitive)
        if wrong := sum(point.wrong for point in points):
            yield Wrong(attempt, wrong, sum(point.checked for point in points))


def list_hosts() -> list[Host]:
    """Return the hosts that accept jobs now, GPU hosts first."""
    return list(Host.objects.taking().order_by("-device", "name"))


def pick_host(connected: Iterable[Host]) -> Host | None:
    """Return the first host with at least two slots, because a collective needs two ranks."""
    return next((host for host in connected if host.slots >= 2), None)
