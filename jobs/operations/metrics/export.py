"""Export metrics in the text format of Prometheus, and send them and the spans of jobs by OTLP over HTTP.

Each OTLP message has all current samples. The instruments of the SDK would store each label set for the lifetime of the
process and drop labels beyond 2,000 sets.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

from django.conf import settings
from django.utils import timezone
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from jobs.models import Attempt
from jobs.operations.metrics.collection import MetricFamily, MetricSamples, Samples, collect_metrics
from jobs.operations.metrics.spans import OVERLAP, collect_spans


class SampleCollector(Collector):
    """Collector of one set of samples."""

    def __init__(self, found: MetricSamples) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        for family, samples in self._found.items():
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.words, labels=family.labels)
            for labels, value in samples.items():
                metric.add_metric(labels, value)
            yield metric


def format_prometheus() -> bytes:
    """Return all metrics in text format 0.0.4 of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampleCollector(collect_metrics()))
    return generate_latest(registry)


EXPORT_TIMEOUT_S = 10.0
# https://ucum.org
UNITS = {
    "_bytes": "By",
    "_seconds": "s",
    "_ratio": "1",
    "_watts": "W",
    "_celsius": "Cel",
    "_per_second": "{tokens}/s",
}


class OtlpExporter:
    """Stage of the controller that sends metrics in a thread."""

    def __init__(self) -> None:
        self._collected = -math.inf
        self._exporter: OTLPMetricExporter | None = None
        self._span_exporter: OTLPSpanExporter | None = None
        self._traced = timezone.now() - OVERLAP
        self._sending = threading.Thread()

    def turn(self) -> None:
        """Send the metrics if it is time and the previous export has ended."""
        if not settings.OTLP_ENDPOINT or time.monotonic() - self._collected < settings.OTLP_EVERY_S:
            return
        if self._sending.is_alive():
            return
        self._collected = time.monotonic()
        self._exporter = self._exporter or _exporter()
        found = build_otlp_message(collect_metrics(), time.time_ns())
        spans, self._traced = collect_spans(self._traced)
        self._sending = threading.Thread(target=self._send, args=(found, spans), name="otlp", daemon=True)
        self._sending.start()

    def close(self) -> None:
        """Stop without sending more."""
        if self._exporter is not None:
            self._exporter.shutdown()
        if self._span_exporter is not None:
            self._span_exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send(self, found: MetricsData, spans: list[ReadableSpan]) -> None:
        assert self._exporter is not None
        self._exporter.export(found)
        if spans:
            self._span_exporter = self._span_exporter or OTLPSpanExporter(
                f"{settings.OTLP_ENDPOINT}/v1/traces", headers=settings.OTLP_HEADERS, timeout=EXPORT_TIMEOUT_S
            )
            self._span_exporter.export(spans)


def _exporter() -> OTLPMetricExporter:
    endpoint = f"{settings.OTLP_ENDPOINT}/v1/metrics"
    return OTLPMetricExporter(endpoint, headers=settings.OTLP_HEADERS, timeout=EXPORT_TIMEOUT_S)


def build_otlp_message(found: MetricSamples, now: int) -> MetricsData:
    """Return the message for samples at `now`, in nanoseconds of Unix time."""
    since = _get_start_times(found)
    metrics = [_build_otlp_metric(family, samples, now, since) for family, samples in found.items()]
    scope = ScopeMetrics(InstrumentationScope("meshboard"), metrics, schema_url="")
    return MetricsData([ResourceMetrics(Resource.create({"service.name": "meshboard"}), [scope], schema_url="")])


def _build_otlp_metric(
    family: MetricFamily, samples: Samples, now: int, since: dict[tuple[str, ...], int]
) -> OtlpMetric:
    name = family.name.removesuffix("_total")
    counts = family.kind == "counter"
    points = [
        NumberDataPoint(dict(zip(family.labels, labels, strict=True)), since.get(labels[:2], 0), now, value)
        for labels, value in samples.items()
    ]
    data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(points)
    return OtlpMetric(name, family.words, get_unit(name), data)


def _get_start_times(found: MetricSamples) -> dict[tuple[str, ...], int]:
    """Return the start of counting per job and attempt, in nanoseconds.

    A start that changes with the controller would make readers count earlier values again.
    """
    counted = {labels[:2] for family, samples in found.items() if family.kind == "counter" for labels in samples}
    attempts = Attempt.objects.filter(job__in={job for job, _ in counted}).values_list("job_id", "number", "created")
    return {(job, str(number)): int(created.timestamp() * 1e9) for job, number, created in attempts}


def get_unit(name: str) -> str:
    """Return the UCUM unit of a metric name, "1" for counts."""
    return next((unit for ending, unit in reversed(UNITS.items()) if name.endswith(ending)), "1")
