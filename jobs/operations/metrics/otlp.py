"""The figures by OTLP over HTTP: looked at by the controller, sent by a thread that it never waits for.

Each message is made of one look, without the SDK's instruments: those keep every set of labels for as long as the
process lives, and beyond 2,000 of them tell new jobs only as one sum.
"""

from __future__ import annotations

import math
import threading
import time

from django.conf import settings
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from jobs.models import Attempt
from jobs.operations.metrics.catalogue import Family
from jobs.operations.metrics.figures import Figures, Samples, figures

PATIENCE_S = 10.0  # for a collector to take one
# https://ucum.org, as OpenTelemetry has units.
UNITS = {
    "_bytes": "By",
    "_seconds": "s",
    "_ratio": "1",
    "_watts": "W",
    "_celsius": "Cel",
    "_per_second": "{tokens}/s",
}


class Otlp:
    """A stage of the controller."""

    def __init__(self) -> None:
        self._looked = -math.inf
        self._exporter: OTLPMetricExporter | None = None
        self._sending = threading.Thread()

    def turn(self) -> None:
        """Look, where it is time to and the collector has taken what it was told before, or was given up."""
        if not settings.OTLP_ENDPOINT or time.monotonic() - self._looked < settings.OTLP_EVERY_S:
            return
        if self._sending.is_alive():
            return
        self._looked = time.monotonic()
        self._exporter = self._exporter or _exporter()
        found = message(figures(), time.time_ns())
        self._sending = threading.Thread(target=self._exporter.export, args=(found,), name="otlp", daemon=True)
        self._sending.start()

    def close(self) -> None:
        """What was not sent is not."""
        if self._exporter is not None:
            self._exporter.shutdown()


def _exporter() -> OTLPMetricExporter:
    endpoint = f"{settings.OTLP_ENDPOINT}/v1/metrics"
    return OTLPMetricExporter(endpoint, headers=settings.OTLP_HEADERS, timeout=PATIENCE_S)


def message(found: Figures, now: int) -> MetricsData:
    """Figures as they stood `now`, in nanoseconds of Unix time."""
    since = _since(found)
    metrics = [_metric(family, samples, now, since) for family, samples in found.items()]
    told = ScopeMetrics(InstrumentationScope("meshboard"), metrics, schema_url="")
    return MetricsData([ResourceMetrics(Resource.create({"service.name": "meshboard"}), [told], schema_url="")])


def _metric(family: Family, samples: Samples, now: int, since: dict[tuple[str, ...], int]) -> Metric:
    name = family.name.removesuffix("_total")
    counts = family.kind == "counter"
    points = [
        NumberDataPoint(dict(zip(family.labels, labels, strict=True)), since.get(labels[:2], 0), now, value)
        for labels, value in samples.items()
    ]
    data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(points)
    return Metric(name, family.words, unit(name), data)


def _since(found: Figures) -> dict[tuple[str, ...], int]:
    """When counting began, in nanoseconds, by job and attempt, which labels of counters begin with. Where it moved, as
    with another controller, a reader would take all that was counted before for new."""
    counted = {labels[:2] for family, samples in found.items() if family.kind == "counter" for labels in samples}
    attempts = Attempt.objects.filter(job__in={job for job, _ in counted}).values_list("job_id", "number", "created")
    return {(job, str(number)): int(created.timestamp() * 1e9) for job, number, created in attempts}


def unit(name: str) -> str:
    """That a name ends in; "1" where it counts."""
    return next((unit for ending, unit in reversed(UNITS.items()) if name.endswith(ending)), "1")
