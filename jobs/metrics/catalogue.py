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
OLDEST_WAIT = _gauge("queue_oldest_wait_seconds", "For how long the oldest queued job has waited; held ones left out.")
PAUSED = _gauge("queue_paused", "1 while staff start nothing.")
HOSTS = _gauge("hosts", "Hosts that were not removed, by how they stand.", "state")
SLOTS = _gauge("slots", "Slots: held by attempts, free, or neither: given to nobody now.", "device", "state")
HOST_SLOTS = _gauge("host_slots", "Slots of a host.", "host", "device")
HOST_SLOTS_HELD = _gauge("host_slots_held", "Of them, those that attempts hold.", "host")
HOST_HEARD = _gauge("host_last_heard_timestamp_seconds", "When a host last spoke, Unix time.", "host")
HOST_CPU = _gauge("host_cpu_utilization_ratio", "Share of a host's cores that was busy lately.", "host")
HOST_MEMORY = _gauge("host_memory_used_bytes", "Memory of a host in use.", "host")
HOST_DISK = _gauge("host_disk_free_bytes", "Free on the disk that runs or checkpoints lie on.", "host", "use")
GPU_BUSY = _gauge("gpu_utilization_ratio", "Share of the time in which a GPU was busy lately.", "host", "gpu")
GPU_MEMORY = _gauge("gpu_memory_used_bytes", "Memory of a GPU in use.", "host", "gpu")
GPU_POWER = _gauge("gpu_power_watts", "What a GPU draws.", "host", "gpu")
GPU_HEAT = _gauge("gpu_temperature_celsius", "How hot a GPU is.", "host", "gpu")
JOB = _gauge("job_info", "1 for each running job, with its name.", "job", "name", "project", "kind", "attempt")
VERDICT = _gauge("job_verdict", "1 for the state that the diagnosis says a running job is in.", "job", "verdict")
VERDICTS = _gauge("verdicts", "Running jobs by what the diagnosis says of them.", "verdict")
JOB_STEP = _gauge("job_step", "Steps that a running job's current attempt has completed.", "job")
JOB_TOKENS = _gauge(
    "job_tokens_per_second", "Tokens of the global batch over the newest step's duration, its slowest rank's.", "job"
)
JOB_LOSS = _gauge("job_loss", "Mean loss of the newest step.", "job")
RANK_STEP = _gauge("rank_step_seconds", "How long a rank's newest step took.", "job", "rank")
RANK_BYTES = Family(
    "meshboard_rank_payload_bytes_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Payload bytes that a rank handed to collectives in its steps, exact.",
)
RANK_CALLS = Family(
    "meshboard_rank_collectives_total",
    "counter",
    ("job", "attempt", "rank", "axis"),
    "Collectives that a rank issued in its steps, exact.",
)
TRIMMED = _gauge("trimmed_series", "Running jobs and ranks that are left out here, being too many.", "what")
TICKED = _gauge(
    "process_last_tick_timestamp_seconds", "End of the last tick of which every stage went well, Unix time.", "process"
)
DELIVERIES = _gauge("deliveries", "Webhook messages and mails that are kept, by outcome.", "way", "outcome")
DEAD_LETTERS = _gauge("dead_letters", "Events that could not be taken in and that staff should look at.")
ORDERS = _gauge("orders_waiting", "Orders to hosts that were decided and not sent yet.")

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))
OF_GPUS = tuple(family.name for family in FAMILIES if "gpu" in family.labels)
