"""Trace context of a job: one W3C trace ID from the request that submitted the job to its ranks."""

from __future__ import annotations

import hashlib
import logging
import re

from contracts.control import LaunchOrder

TRACEPARENT_VARIABLE = "TRACEPARENT"  # OpenTelemetry reads this variable in each rank
TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def parse_traceparent(header: str) -> str | None:
    """Return the trace ID of a `traceparent` header, None if the header is invalid."""
    match = TRACEPARENT.fullmatch(header)
    return match[1] if match else None


def compute_span_id(job: str, attempt: int = 0) -> str:
    """Return the span ID of an attempt, or of the job for attempt 0. Each process computes equal IDs."""
    return hashlib.sha256(f"{job}/{attempt}".encode()).hexdigest()[:16]


def build_traceparent(trace_id: str, job: str, attempt: int) -> str:
    """Return the `traceparent` of an attempt, under which its ranks create their spans."""
    return f"00-{trace_id}-{compute_span_id(job, attempt)}-01"


def log_launch_order(log: logging.Logger, event: str, order: LaunchOrder) -> None:
    """Log what happened to the order of an attempt, with the trace ID of the job."""
    trace = order.get("trace", "")
    fields = {"job": order["job"], "attempt": order["attempt"], "trace_id": trace}
    log.info("%s/%d: %s (trace %s)", order["job"], order["attempt"], event, trace or "unknown", extra=fields)
