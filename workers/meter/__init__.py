"""Counts and times every collective of a rank, and sends what it counted to the supervisor."""

from workers.meter.exporter import Exporter
from workers.meter.group import metered_backend
from workers.meter.recorder import Record, Recorder

__all__ = ["Exporter", "Record", "Recorder", "metered_backend"]
