"""Find the newest benchmarks of a collective: results, captured tensors, and wrong elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from django.db.models import F, Q, QuerySet

from jobs.models import Attempt, Host, Job, Status
from jobs.queue.attempt_completion import parse_lab_result
from planner.facts.collectives import LabPoint, LabResult, LabStep
from planner.facts.spec import LabPrimitive

DEFAULT_RANKS = 4


class MeasuredBenchmark(NamedTuple):
    """Hold the results of a collective in a successful run."""

    attempt: Attempt
    result: LabResult
    points: list[LabPoint]


class CapturedTensors(NamedTuple):
    """Hold the tensors of a collective in a successful run."""

    attempt: Attempt
    result: LabResult
    step: LabStep


class WrongResult(NamedTuple):
    """Describe a failed run with wrong elements of the collective."""

    attempt: Attempt
    wrong: int
    checked: int


class NewestBenchmarks(NamedTuple):
    """Hold the newest runs of each kind. `wrong` is newer than `measured`."""

    measured: MeasuredBenchmark | None
    captured: CapturedTensors | None
    wrong: WrongResult | None


def find_newest(jobs: QuerySet[Job], primitive: LabPrimitive) -> NewestBenchmarks:
    """Return the newest benchmarks of a collective among `jobs`."""
    # A spec names the collective, or none. Only PostgreSQL has `contains` for JSON, so match text.
    names = "job__spec__lab__primitives"
    runs_primitive = Q(**{f"{names}__icontains": f'"{primitive}"'}) | Q(**{f"{names}__isnull": True})
    labs = Attempt.objects.filter(runs_primitive, job__in=jobs.filter(kind="lab"), number=F("job__attempt"))
    attempts = labs.select_related("job").order_by("-job__changed")
    succeeded, failed = attempts.filter(job__status=Status.SUCCEEDED), attempts.filter(job__status=Status.FAILED)
    with_points = _iterate_points(succeeded, primitive)
    measured = next((MeasuredBenchmark(*found) for found in with_points if found[2]), None)
    if measured is not None:
        failed = failed.filter(job__changed__gt=measured.attempt.job.changed)
    captured = (
        CapturedTensors(attempt, result, step)
        for attempt, result in _iterate_results(succeeded.exclude(exit__summary__lab__steps=[]))
        for step in result.steps
        if step.primitive == primitive
    )
    wrong_results = (
        WrongResult(attempt, wrong, sum(point.checked for point in points))
        for attempt, _, points in _iterate_points(failed, primitive)
        if (wrong := sum(point.wrong for point in points))
    )
    return NewestBenchmarks(measured, next(captured, None), next(wrong_results, None))


def _iterate_results(attempts: QuerySet[Attempt]) -> Iterator[tuple[Attempt, LabResult]]:
    with_results = attempts.filter(exit__summary__lab__isnull=False)
    for attempt in with_results.iterator(chunk_size=1):  # usually the first one matches, and an exit report is large
        result = parse_lab_result(((attempt.exit or {}).get("summary") or {}).get("lab"))
        if result is not None:
            yield attempt, result


def _iterate_points(
    attempts: QuerySet[Attempt], primitive: LabPrimitive
) -> Iterator[tuple[Attempt, LabResult, list[LabPoint]]]:
    for attempt, result in _iterate_results(attempts):
        yield attempt, result, [point for point in result.points if point.primitive == primitive]


def list_hosts() -> list[Host]:
    """Return the hosts that accept jobs now, GPU hosts first."""
    return list(Host.objects.accepting_jobs().order_by("-device", "name"))


def pick_host(connected: Iterable[Host]) -> Host | None:
    """Return the first host with at least two slots, because a collective needs two ranks."""
    return next((host for host in connected if host.slots >= 2), None)
