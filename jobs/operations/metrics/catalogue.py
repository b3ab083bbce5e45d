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


JOBS = _gauge("jobs", "Number of jobs, by status of the current attempt.", "status")
QUEUED_SLOTS = _gauge("queue_slots", "Total number of slots that queued jobs request.", "device")
OLDEST_WAIT = _gauge(
    "queue_oldest_wait_seconds", "Seconds that the oldest queued job has waited, except for held jobs."
)
PAUSED = _gauge("queue_paused", "1 while the queue is paused, otherwise 0.")
HOSTS = _gauge("hosts", "Number of hosts by state, except for removed hosts.", "state")
SLOTS = _gauge("slots", "Number of slots by state: used by attempts, free, or unavailable.", "device", "state")
HOST_SLOTS = _gauge("host_slots", "Number of slots of a host.", "host", "device")
HOST_SLOTS_HELD = _gauge("host_slots_held", "Number of slots of a host that attempts use.", "host")
HOST_HEARD = _gauge("host_last_heard_timestamp_seconds", "Unix time of the last contact with a host.", "host")
HOST_CPU = _gauge("host_cpu_utilization_ratio", "Recent CPU utilization of a host, from 0 to 1.", "host")
HOST_MEMORY = _gauge("host_memory_used_bytes", "Used memory of a host.", "host")
HOST_DISK = _gauge(
    "host_disk_free_bytes", "Free space on the disk of a host that stores runs or checkpoints.", "host", "use"
)
GPU_BUSY = _gauge("gpu_utilization_ratio", "Recent utilization of a GPU, from 0 to 1.", "host", "gpu")
GPU_MEMORY = _gauge("gpu_memory_used_bytes", "Used memory of a GPU.", "host", "gpu")
GPU_POWER = _gauge("gpu_power_watts", "Power draw of a GPU.", "host", "gpu")
GPU_HEAT = _gauge("gpu_temperature_celsius", "Temperature of a GPU.", "host", "gpu")
JOB = _gauge(
    "job_info",
    "Always 1 for a running job, with the job name and other properties as labels.",
    "job",
    "name",
    "project",
    "kind",
    "attempt",
)
VERDICT = _gauge(
    "job_verdict", "1 for the current verdict state of a running job, named by the label `verdict`.", "job", "verdict"
)
VERDICTS = _gauge("verdicts", "Number of running jobs by verdict state.", "verdict")
JOB_STEP = _gauge("job_step", "Number of completed steps in the current attempt of a running job.", "job")
JOB_TOKENS = _gauge(
    "job_tokens_per_second", "Tokens of the global batch divided by the latest step time of the slowest rank.", "job"
)
JOB_LOSS = _gauge("job_loss", "Mean loss of the latest step of a running job.", "job")
RANK_STEP = _gauge("rank_step_seconds", "Duration of the latest step of a rank.", "job", "rank")
RANK_BYTES = Family(
    "meshboard_rank_payload_bytes_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Exact number of payload bytes that a rank passed to collectives in training steps.",
)
RANK_CALLS = Family(
    "meshboard_rank_collectives_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Exact number of collectives that a rank called in training steps.",
)
TRIMMED = _gauge(
    "trimmed_series", "Number of running jobs and ranks that these metrics omit because of a limit.", "what"
)
TICKED = _gauge("process_last_tick_timestamp_seconds", "Unix time when the process last completed a tick.", "process")
DELIVERIES = _gauge("deliveries", "Number of stored webhook messages and emails, by outcome.", "way", "outcome")
DEAD_LETTERS = _gauge("dead_letters", "Number of events that failed and need the attention of staff.")
ORDERS = _gauge("orders_waiting", "Number of commands to hosts that wait to be sent.")

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))
OF_GPUS = tuple(family.name for family in FAMILIES if "gpu" in family.labels)
