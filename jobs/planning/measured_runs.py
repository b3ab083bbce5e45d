"""Measurements of runs that correct later plans of their host, and advice for a job that has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from django.db.models import Q
from pydantic import ValidationError

from contracts.control import ExitReport
from contracts.telemetry.items import WARMUP_STEPS
from jobs.models import TERMINAL, Attempt, Host, HostRun, Job, Member
from jobs.planning.planner_processes import run_task
from jobs.planning.schemas import Advice
from planner.cost.estimate import get_default_cluster
from planner.facts.kinds import get_kind_rules
from planner.facts.spec import JobSpec
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.hardware.profile import LinkPoint, MeasuredRun, strip_spec
from planner.search.post_run_advice import Hindsight

MIN_TIMED_STEPS = 5  # after the warm-up steps
MAX_RUNS_PER_HOST = 128  # the newest
MAX_LINKS = 64
OLD_SPEC = "`spec` is from an older version that this version cannot plan. Submit a new job."


def store_measured_run(member: Member, report: ExitReport) -> None:
    """Store the measurements of a run on a single host. A repeated report changes nothing.

    The caller holds the lock of the host's row, so that the newest runs stay.
    """
    host = member.host
    run = extract_measured_run(member.attempt.job.spec, report)
    if host is None or run is None or _shared_cores(member, host):
        return
    row = HostRun(host=host, attempt=member.attempt, device_name=host.device_name, run=run.model_dump(mode="json"))
    HostRun.objects.bulk_create([row], ignore_conflicts=True)
    newest = HostRun.objects.filter(host=host).values_list("pk", flat=True)[:MAX_RUNS_PER_HOST]
    HostRun.objects.filter(host=host).exclude(pk__in=list(newest)).delete()


def extract_measured_run(spec: Mapping[str, Any], report: ExitReport) -> MeasuredRun | None:
    """Return the time, memory, and links in an exit report, or None without enough timed steps of a training job."""
    summary = report["summary"]
    measured = summary.get("measured") if summary else None
    if report["outcome"] not in ("succeeded", "cancelled") or not summary or not measured:
        return None
    if measured["steps"] < MIN_TIMED_STEPS or measured["step_s"] <= 0:
        return None
    try:
        job_spec = JobSpec.model_validate(spec)
    except ValidationError:  # of an older version
        return None
    if get_kind_rules(spec).shares_one_slot or not get_kind_rules(spec).trains:
        return None
    return MeasuredRun(
        spec=strip_spec(job_spec),
        steps=measured["steps"],
        step_s=measured["step_s"],
        peak_bytes=max(summary.get("peak_bytes", {}).values(), default=0) or None,
        tells_copies=True,
        links=tuple(extract_link_points(summary["cells"].values())),
    )


def extract_link_points(ranks: Iterable[Iterable[Mapping[str, Any]]]) -> list[LinkPoint]:
    """Return the mean time of each collective in a step, on the rank that waited least.

    Pipeline messages are omitted, because they mostly wait for the pipeline and not for the link.
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
    return list(fastest.values())[:MAX_LINKS]


def load_measured_runs(host: Host) -> list[MeasuredRun]:
    """Return the runs on the current device of a host, newest first, without those of another version."""
    runs = []
    for row in HostRun.objects.filter(host=host, device_name=host.device_name).values_list("run", flat=True)[
        :MAX_RUNS_PER_HOST
    ]:
        try:
            runs.append(MeasuredRun.model_validate(row, strict=False))
        except ValidationError:
            continue
    return runs


def _shared_cores(member: Member, host: Host) -> bool:
    """Return whether another attempt ran at the same time on the cores of a CPU host."""
    if host.device != "cpu":
        return False
    overlaps = Q(ended__isnull=True) | Q(ended__gt=member.attempt.created)
    return Member.objects.filter(overlaps, host=host).exclude(pk=member.pk).exists()


class NoAdviceError(Exception):
    """The job has no advice. `field` names the cause."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def compute_advice(job: Job) -> Advice:
    """Return how much faster the last attempt would have been with one other choice.

    Raises:
        NoAdviceError: The job has not ended, is not a training job, or has too few timed steps.
        BusyError
    """
    kind = get_kind_rules(job.spec)
    if not kind.trains or kind.shares_one_slot:
        raise NoAdviceError("kind", f"`kind` is {job.kind}, but faster layouts are available only for training jobs.")
    if job.status not in TERMINAL:
        message = "Faster layouts are available after the run has ended."
        raise NoAdviceError("status", f"`status` is {job.status}. {message}")
    attempt = job.attempts.filter(number=job.attempt).first()
    summary = (attempt.exit or {}).get("summary") if attempt else None
    measured = (summary or {}).get("measured")
    steps = measured["steps"] if measured else 0
    if attempt is None or summary is None or measured is None or steps < MIN_TIMED_STEPS or measured["step_s"] <= 0:
        timed = f"The run has {format_count(steps, 'timed step')} after the first {WARMUP_STEPS} steps"
        message = f"{timed}, but {MIN_TIMED_STEPS} timed steps are needed. Use a higher `train.steps`."
        raise NoAdviceError("train.steps", message)
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError:
        raise NoAdviceError("spec", OLD_SPEC) from None
    time = job.estimate.get("time", {})
    if "interval" not in time:
        message = "The estimate of the job is from an older version and has no margin of error. Submit a new job."
        raise NoAdviceError("spec", message)
    options = {
        "step_s": measured["step_s"],
        "busy_s": compute_busy_seconds(summary),
        "parts_s": get_traced_parts(attempt),
        "peak_bytes": max(summary.get("peak_bytes", {}).values(), default=None),
        "predicted_s": {part["name"]: part["seconds"] for part in time["parts"]},
        "sure": time["interval"],
    }
    advice: Hindsight = run_task("advise", spec, get_submit_cluster(job, spec), options)
    return {**advice, "steps": steps, "host": attempt.format_hosts()}


def get_submit_cluster(job: Job, spec: JobSpec) -> Cluster:
    """Return the cluster that the job was planned for at submit, without corrections by later runs."""
    try:
        return Cluster.model_validate(job.hardware, strict=False)
    except ValidationError:  # stored by another version
        return get_default_cluster(spec)


def get_traced_parts(attempt: Attempt) -> dict[str, float]:
    """Return the seconds per step of each part in the diagnosis. It is empty without traced steps."""
    measured = (attempt.diagnosis or {}).get("measured")
    parts = measured["parts"] if measured else []
    return {part["name"]: part["seconds"] for part in parts if part["kind"] != "hidden"}


def compute_busy_seconds(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds per step in collectives by axis, averaged over ranks."""
    num_steps = summary.get("ran_steps") or summary["steps"]
    ranks = summary["cells"].values()
    total: dict[str, float] = defaultdict(float)
    for cell in (cell for cells in ranks for cell in cells if cell["phase"] == "step"):
        total[cell["axis"]] += cell["busy_s"]
    return {axis: seconds / len(ranks) / num_steps for axis, seconds in total.items()} if num_steps else {}
