"""The meter: sees every collective of a rank, counts it exactly, and tells the supervisor.

`group` wraps torch's process groups, `recorder` counts, `exporter` sends.
"""

from workers.meter.exporter import Exporter
from workers.meter.process_group import register_metered_backend
from workers.meter.recorder import Record, Recorder

__all__ = ["Exporter", "Record", "Recorder", "register_metered_backend"]
