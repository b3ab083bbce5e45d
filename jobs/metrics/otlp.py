"""The figures by OTLP over HTTP: looked at by the controller, sent by a thread of the SDK's that it never waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from django.conf import settings
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from jobs.metrics.catalogue import FAMILIES, Family
from jobs.metrics.figures import Figures, figures

PATIENCE_S = 10.0  # for a collector to take one
STALE_AFTER = 3  # intervals without a look, as of a controller that waits for another: then nothing is told
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
        self._found: Figures = {}
        self._looked = -math.inf
        self._provider: MeterProvider | None = None

    def turn(self) -> None:
        """Look, where it is time to."""
        if not settings.OTLP_ENDPOINT or time.monotonic() - self._looked < settings.OTLP_EVERY_S:
            return
        self._found, self._looked = figures(), time.monotonic()
        if self._provider is None:
            self._provider = self._begin()

    def close(self) -> None:
        """What was not sent is not."""
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=500)

    def _begin(self) -> MeterProvider:
        exporter = OTLPMetricExporter(
            endpoint=f"{settings.OTLP_ENDPOINT}/v1/metrics", headers=headers(settings.OTLP_HEADERS), timeout=PATIENCE_S
        )
        every = PeriodicExportingMetricReader(
            exporter, export_interval_millis=1000 * settings.OTLP_EVERY_S, export_timeout_millis=1000 * PATIENCE_S
        )
        resource = Resource.create({"service.name": "meshboard"})
        provider = MeterProvider([every], resource=resource, shutdown_on_exit=False)
        meter = provider.get_meter("meshboard")
        for family in FAMILIES:
            make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
            name = family.name.removesuffix("_total")
            make(name, callbacks=[self._observed(family)], unit=unit(name), description=family.words)
        return provider

    def _observed(self, family: Family) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            if time.monotonic() - self._looked > STALE_AFTER * settings.OTLP_EVERY_S:
                return []
            samples = self._found.get(family, {})
            return [
                Observation(value, dict(zip(family.labels, labels, strict=True))) for labels, value in samples.items()
            ]

        return observe


def unit(name: str) -> str:
    """That a name ends in; "1" where it counts."""
    return next((unit for ending, unit in reversed(UNITS.items()) if name.endswith(ending)), "1")


def headers(text: str) -> dict[str, str]:
    """`name=value` with commas between."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
