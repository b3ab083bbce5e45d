"""What runs leave with their host, and a host as its runs showed it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.db.models import Q
from pydantic import ValidationError

from contracts.control import ExitReport
from jobs.models import Host, HostRun, Member
from planner.facts.kinds import get_kind_rules
from planner.facts.spec import JobSpec
from planner.hardware.profile import LinkPoint, MeasuredRun, strip_spec

FEWEST_STEPS = 5  # timed, after the first ones: fewer are no measure of a step
KEPT = 128  # runs of a host, the newest
MOST_LINKS = 64


def remember(member: Member, told: ExitReport) -> None:
    """Keep what a gang of one host measured that ended well, or was cancelled late enough.

    Hearing its end again adds nothing.

    To be called with the host's row locked: the newest stay.
    """
    host = member.host
    run = run_of(member.attempt.job.spec, told)
    if host is None or run is None or _was_disturbed(member, host):
        return
    row = HostRun(host=host, attempt=member.attempt, device_name=host.device_name, run=run.model_dump(mode="json"))
    HostRun.objects.bulk_create([row], ignore_conflicts=True)
    kept = HostRun.objects.filter(host=host).values_list("pk", flat=True)[:KEPT]
    HostRun.objects.filter(host=host).exclude(pk__in=list(kept)).delete()


def run_of(spec: Mapping[str, Any], told: ExitReport) -> MeasuredRun | None:
    """What an exit report tells of time and memory; None where it says nothing of them."""
    summary = told["summary"]
    measured = summary.get("measured") if summary else None
    if told["outcome"] not in ("succeeded", "cancelled") or not summary or not measured:
        return None
    if measured["steps"] < FEWEST_STEPS or measured["step_s"] <= 0:
        return None
    try:
        asked = JobSpec.model_validate(spec)
    except ValidationError:  # of an older version
        return None
    if get_kind_rules(spec).shares_one_slot or not get_kind_rules(spec).trains:
        return None
    return MeasuredRun(
        spec=strip_spec(asked),
        steps=measured["steps"],
        step_s=measured["step_s"],
        peak_bytes=max(summary.get("peak_bytes", {}).values(), default=0) or None,
        tells_copies=True,
        links=tuple(links_of(summary["cells"].values())),
    )


def links_of(ranks: Iterable[Iterable[Mapping[str, Any]]]) -> list[LinkPoint]:
    """The mean call of each collective in a step, of the rank that waited least: the last to arrive waits for nobody.

    Messages between stages are left out: most of their time is the pipe's, not the link's.
    """
    fastest: dict[tuple[str, str, int], LinkPoint] = {}
    for cell in (cell for cells in ranks for cell in cells):
        if cell["phase"] != "step" or cell["axis"] == "pp" or cell["group_size"] < 2:
            continue
        if not (cell["count"] and cell["completed"] and cell["busy_s"] > 0 and cell["payload_bytes"] >= cell["count"]):
            continue
        point = LinkPoint(
            op=cell["op"],
            group_size=cell["group_size"],
            payload_bytes=cell["payload_bytes"] // cell["count"],
            seconds=cell["busy_s"] / cell["completed"],
        )
        key = cell["op"], cell["axis"], cell["group_size"]
        if key not in fastest or point.seconds < fastest[key].seconds:
            fastest[key] = point
    return list(fastest.values())[:MOST_LINKS]


def runs_of(host: Host) -> list[MeasuredRun]:
    """What ended on the host's present device, the newest first; those of another version are passed over."""
    found = []
    for told in HostRun.objects.filter(host=host, device_name=host.device_name).values_list("run", flat=True)[:KEPT]:
        try:
            found.append(MeasuredRun.model_validate(told, strict=False))
        except ValidationError:
            continue
    return found


def _was_disturbed(member: Member, host: Host) -> bool:
    """Whether another attempt ran beside it on the cores that a CPU's ranks share."""
    if host.device != "cpu":
        return False
    overlapping = Q(ended__isnull=True) | Q(ended__gt=member.attempt.created)
    return Member.objects.filter(overlapping, host=host).exclude(pk=member.pk).exists()
