"""Traffic meter: wrap the process groups of torch, count each collective exactly, and report to the supervisor.

`process_group` wraps torch's groups, `recorder` counts, `exporter` sends.
"""

from workers.meter.exporter import Exporter
from workers.meter.process_group import register_metered_backend
from workers.meter.recorder import Record, Recorder

__all__ = ["Exporter", "Record", "Recorder", "register_metered_backend"]
