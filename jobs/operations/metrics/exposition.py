"""The figures as Prometheus reads them. All of them are everybody's: any web process answers alike."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from jobs.operations.metrics.figures import Figures, figures


class Figured(Collector):
    """Of one look at the board."""

    def __init__(self, found: Figures) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        for family, samples in self._found.items():
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.words, labels=family.labels)
            for labels, value in samples.items():
                metric.add_metric(labels, value)
            yield metric


def text() -> bytes:
    """In Prometheus' text format, 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figured(figures()))
    return generate_latest(registry)
