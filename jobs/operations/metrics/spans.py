"""OTLP spans of ended attempts and jobs, in the trace of the request that submitted the job."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import F
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from contracts.traces import compute_span_id
from jobs.models import TERMINAL, Attempt

MAX_ATTEMPTS_PER_EXPORT = 500
# A new controller sends these again, because the previous controller may have ended before its export.
OVERLAP = timedelta(minutes=5)


def collect_spans(since: datetime) -> tuple[list[ReadableSpan], datetime]:
    """Return the spans of attempts that ended after `since`, and the time from which to continue.

    A job has a span after its last attempt. IDs do not change, so a repeated span is a duplicate and no second span.
    """
    ended = Attempt.objects.filter(ended__gt=since).exclude(job__trace_id="").select_related("job").order_by("ended")
    attempts = list(ended[:MAX_ATTEMPTS_PER_EXPORT])
    spans = [_build_attempt_span(attempt) for attempt in attempts]
    last = ended.filter(job__status__in=TERMINAL, number=F("job__attempt"))
    spans += [_build_job_span(attempt) for attempt in last.filter(pk__in=[attempt.pk for attempt in attempts])]
    return spans, attempts[-1].ended or since if attempts else since


def _build_attempt_span(attempt: Attempt) -> ReadableSpan:
    return _build_span(f"attempt {attempt.number}", attempt, attempt.number, attempt.created)


def _build_job_span(attempt: Attempt) -> ReadableSpan:
    return _build_span(f"job {attempt.job.kind}", attempt, 0, attempt.job.created)


def _build_span(name: str, attempt: Attempt, number: int, start: datetime) -> ReadableSpan:
    """Build the span of an attempt, or of its job for number 0, which is the parent of its attempts."""
    job, report = attempt.job, attempt.exit or {}
    outcome = report.get("outcome", "lost")
    failed = outcome in ("failed", "lost")
    assert attempt.ended is not None
    return ReadableSpan(
        name,
        context=_build_context(job.trace_id, job.id, number),
        parent=_build_context(job.trace_id, job.id, 0) if number else None,
        resource=Resource.create({"service.name": "meshboard"}),
        attributes={
            "meshboard.job": job.id,
            "meshboard.attempt": attempt.number,
            "meshboard.kind": job.kind,
            "meshboard.project": job.project,
            "meshboard.outcome": outcome,
        },
        status=Status(StatusCode.ERROR, str(report.get("reason", ""))) if failed else Status(StatusCode.OK),
        start_time=_to_nanoseconds(start),
        end_time=_to_nanoseconds(attempt.ended),
        instrumentation_scope=InstrumentationScope("meshboard"),
    )


def _build_context(trace_id: str, job: str, attempt: int) -> SpanContext:
    span_id = int(compute_span_id(job, attempt), 16)
    return SpanContext(int(trace_id, 16), span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _to_nanoseconds(time: datetime) -> int:
    return round(time.timestamp() * 1e6) * 1000
