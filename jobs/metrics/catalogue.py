"""Every metric: its name with the unit in it, what tells its samples apart, and what it is in words."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """A metric. A counter's name ends in `_total`, and what it counts only rises within an attempt."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    words: str


def _gauge(name: str, words: str, *labels: str) -> Family:
    return Family(f"meshboard_{name}", "gauge", labels, words)


JOBS = _gauge("jobs", "Jobs by the status of their current attempt.", "status")
QUEUED_SLOTS = _gauge("queue_slots", "Slots that queued jobs ask for.", "device")
OLDEST_WAIT = _gauge("queue_oldest_wait_seconds", "Wait of the oldest queued job, without held jobs.")
PAUSED = _gauge("queue_paused", "1 while the queue is paused.")
HOSTS = _gauge("hosts", "Hosts by state, without removed hosts.", "state")
SLOTS = _gauge("slots", "Slots by state: used by attempts, free, or unavailable.", "device", "state")
HOST_SLOTS = _gauge("host_slots", "Slots of a host.", "host", "device")
HOST_SLOTS_HELD = _gauge("host_slots_held", "Slots of a host in use by attempts.", "host")
HOST_HEARD = _gauge("host_last_heard_timestamp_seconds", "Last contact with a host, Unix time.", "host")
HOST_CPU = _gauge("host_cpu_utilization_ratio", "Recent CPU utilization of a host, from 0 to 1.", "host")
HOST_MEMORY = _gauge("host_memory_used_bytes", "Memory of a host in use.", "host")
HOST_DISK = _gauge("host_disk_free_bytes", "Free space on the disk of runs or checkpoints.", "host", "use")
GPU_BUSY = _gauge("gpu_utilization_ratio", "Recent utilization of a GPU, from 0 to 1.", "host", "gpu")
GPU_MEMORY = _gauge("gpu_memory_used_bytes", "Memory of a GPU in use.", "host", "gpu")
GPU_POWER = _gauge("gpu_power_watts", "Power draw of a GPU.", "host", "gpu")
GPU_HEAT = _gauge("gpu_temperature_celsius", "Temperature of a GPU.", "host", "gpu")
JOB = _gauge("job_info", "1 for each running job, with its name.", "job", "name", "project", "kind", "attempt")
VERDICT = _gauge("job_verdict", "1 for the current verdict state of a running job.", "job", "verdict")
VERDICTS = _gauge("verdicts", "Running jobs by verdict state.", "verdict")
JOB_STEP = _gauge("job_step", "Steps completed in the current attempt of a running job.", "job")
JOB_TOKENS = _gauge(
    "job_tokens_per_second", "Tokens of the global batch per second of the latest step on its slowest rank.", "job"
)
JOB_LOSS = _gauge("job_loss", "Mean loss of the latest step.", "job")
RANK_STEP = _gauge("rank_step_seconds", "Duration of the latest step of a rank.", "job", "rank")
RANK_BYTES = Family(
    "meshboard_rank_payload_bytes_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Payload bytes that a rank passed to collectives in its steps, exact.",
)
RANK_CALLS = Family(
    "meshboard_rank_collectives_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Collectives that a rank issued in its steps, exact.",
)
TRIMMED = _gauge("trimmed_series", "Running jobs and ranks omitted because of the limit.", "what")
TICKED = _gauge("process_last_tick_timestamp_seconds", "End of the last successful tick, Unix time.", "process")
DELIVERIES = _gauge("deliveries", "Stored webhook messages and emails, by outcome.", "way", "outcome")
DEAD_LETTERS = _gauge("dead_letters", "Events that failed and need the attention of staff.")
ORDERS = _gauge("orders_waiting", "Orders to hosts that wait to be sent.")

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))
OF_GPUS = tuple(family.name for family in FAMILIES if "gpu" in family.labels)
