"""Read duration, step time, loss, and reason of listed jobs, with two queries for all jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import F, Func, JSONField
from django.db.models.fields.json import KT
from django.utils import timezone

from jobs.models import OCCUPIES_HOST, TERMINAL, Attempt, Job, StateChange, Status
from jobs.pages.jobs.live_figures import LatestStep
from jobs.queue.scheduling.waiting_reasons import put_fact_first

# The columns that need each query
ATTEMPT_COLUMNS = {"status", "steps", "step_time", "loss", "reason", "ended", "speed"}
CHANGE_COLUMNS = {"duration", "reason"}
STARTED = (Status.STARTING, Status.RUNNING)
UNHEALTHY = ("slow", "hung")  # states of a verdict that the list shows while a job runs
SOURCE_WORDS = {  # short words for some of contracts.telemetry.metrics.MetricSource
    "SummaryWriter": "TensorBoard",
    "event file": "metric files",
    "log line": "log lines",
    "numbered log line": "log lines",
}
NOT_EVALUATED = "not evaluated yet"


class LastLossExpression(Func):
    """Select the last point of the loss curve of an exit report."""

    output_field = JSONField()

    def __init__(self) -> None:
        super().__init__(F("exit"))

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, template="(%(expressions)s #> '{summary,losses,-1}')", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(
            compiler, connection, template="json_extract(%(expressions)s, '$.summary.losses[#-1]')", **extra
        )


class Measured(NamedTuple):
    """Stored results of the current attempt of a job."""

    ended: datetime | None
    steps: int | None
    speed: float | None  # tokens per second
    step_s: float | None
    last_loss: Mapping[str, Any] | None  # contracts.control.LossPoint
    live_step_s: float | None  # of the diagnosis
    verdict: Mapping[str, Any]
    reported: Mapping[str, Any] | None  # jobs.core.verdict_schema.ReportedLoss


class AttemptChanges(NamedTuple):
    """The changes of the current attempt of a job."""

    began: datetime | None
    last: datetime | None
    reason: str


NOT_MEASURED = Measured(None, None, None, None, None, None, {}, None)
NO_CHANGES = AttemptChanges(None, None, "")


def read_measured(jobs: list[Job], columns: Collection[str]) -> dict[str, Measured]:
    """Return the stored results by job, if a column needs them."""
    if not ATTEMPT_COLUMNS.intersection(columns):
        return {}
    current = Attempt.objects.filter(job__in=[job.id for job in jobs], number=F("job__attempt"))
    rows = current.values_list(
        *("job_id", "ended", "exit__summary__steps", "exit__summary__tokens_per_s", "exit__summary__measured__step_s"),
        *(LastLossExpression(), "diagnosis__measured__step_s"),
        *(KT("diagnosis__state"), KT("diagnosis__sentence"), "diagnosis__over", "diagnosis__loss"),
    )
    found: dict[str, Measured] = {}
    for job, ended, steps, speed, step_s, last_loss, live_step_s, state, sentence, over, reported in rows:
        verdict = {"state": state, "sentence": sentence or "", "over": over is True}
        found[job] = Measured(ended, steps, speed, step_s, last_loss, live_step_s, verdict, reported)
    return found


def read_runs(jobs: list[Job], columns: Collection[str]) -> dict[str, AttemptChanges]:
    """Return the changes by job, if a column needs them."""
    if not CHANGE_COLUMNS.intersection(columns):
        return {}
    found: dict[str, AttemptChanges] = {}
    changes = StateChange.objects.filter(job__in=[job.id for job in jobs], attempt=F("job__attempt"))
    for job, status, reason, at in changes.order_by("id").values_list("job_id", "status", "reason", "at"):
        began = found.get(job, NO_CHANGES).began
        found[job] = AttemptChanges(began or (at if status in STARTED else None), at, reason)
    return found


def format_measures(job: Job, measured: Measured, run: AttemptChanges, live: LatestStep | None) -> dict[str, Any]:
    """Return the values of a row. A value that is not known is None."""
    verdict, last = measured.verdict, measured.last_loss
    # The curve ends before the last step if the loss became NaN or infinite.
    loss = last["loss"] if last and last["step"] == measured.steps else None
    if live:
        loss = live.loss
    # A script numbers its steps itself, so its last loss can be of any step.
    reported = None if live and loss is not None else measured.reported
    if reported:
        loss = float(reported["not_finite"]) if reported["loss"] is None else reported["loss"]
    return {
        "ended": measured.ended if job.status in TERMINAL else None,
        "speed": measured.speed,
        "step_s": measured.step_s or measured.live_step_s,
        "loss": loss,
        "loss_source": SOURCE_WORDS.get(reported["source"], reported["source"]) if reported else "",
        "loss_step": _format_step(reported) if reported else "",
        "duration_s": _get_duration(job, run),
        "reason": _get_reason(job, verdict, run.reason),
        "stalled": job.status == Status.RUNNING and verdict.get("state") == "hung" and not verdict.get("over"),
    }


def _format_step(reported: Mapping[str, Any]) -> str:
    """Return the step of a loss. A log line without a step has the number of its report."""
    return f"{'report' if reported['source'] == 'numbered log line' else 'step'} {reported['step']:,}"


def _get_duration(job: Job, run: AttemptChanges) -> float | None:
    if run.began is None or run.last is None:
        return None
    end = timezone.now() if job.status in OCCUPIES_HOST else run.last
    return (end - run.began).total_seconds()


def _get_reason(job: Job, verdict: Mapping[str, Any], reason: str) -> str:
    """Return why a job waits, does not run as planned, or did not succeed."""
    if job.status == Status.QUEUED:
        return put_fact_first(job.wait_reason) or NOT_EVALUATED
    if job.status == Status.SUCCEEDED:
        return ""
    if job.status not in TERMINAL:
        if verdict.get("state") in UNHEALTHY:
            return str(verdict["sentence"])
        return reason if job.status in (Status.UNREACHABLE, Status.CANCELLING) else ""
    if verdict.get("over") and verdict.get("state") == "failed":
        return without_status(str(verdict["sentence"]), job.status)
    return reason


def without_status(sentence: str, status: str) -> str:
    """Return a verdict without the status that a badge shows next to the verdict."""
    rest = sentence.removeprefix(f"{status.capitalize()}: ")
    return rest[:1].upper() + rest[1:]
