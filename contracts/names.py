"""Celery task names, queue names and Redis keys that the controller, the web processes and the hosts share."""

from __future__ import annotations

TASK_LAUNCH = "workers.launch"  # argument: control.LaunchOrder; starts a detached supervisor and returns
TASK_ACKNOWLEDGE = "workers.acknowledge"  # arguments: job, attempt; the exit report is stored
TASK_RESEND_REPORT = "workers.tell_again"  # arguments: job, attempt; the exit report is not stored, or no longer
TASK_READ_LOG = "workers.read_log"  # argument: logs.LogOrder; one part of a log, answered at `log_key`
TASK_LEND = "workers.lend"  # argument: control.LendOrder; sends the files of a checkpoint, see `loan_key`

LEGACY_EVENTS_STREAM = "meshboard:events"  # shared by all hosts of older versions
SAVE_FILE = "save"  # next to the telemetry socket: the run saves a checkpoint and stops
LOAN_FILE = "loan"  # next to the telemetry socket: a control.LoanAddress as JSON
CANCEL_KEY_PREFIX = "meshboard:cancel:"
UPLOAD_SCHEME = "Upload"  # of the Authorization header with which a host downloads the script of an attempt


def host_key_prefix(host: str) -> str:
    """Return the prefix of all Redis keys of one host. Host names contain no colon."""
    return f"meshboard:host:{host}:"


def events_stream(host: str) -> str:
    """Return the Redis Stream of events from a host.

    The field "b" of an entry is one msgpack Event, "s" its signature (`security.sign`).
    """
    return f"{host_key_prefix(host)}events"


def host_queue(host: str) -> str:
    """Return the Celery queue that only the worker of this host reads."""
    return f"{host_key_prefix(host)}orders"


def log_key(host: str, question: str) -> str:
    """Return the Redis list for the answer to a `logs.LogOrder`: signature and `logs.LogPart`. It expires."""
    return f"{host_key_prefix(host)}log:{question}"


def loan_key(host: str, job: str, attempt: int) -> str:
    """Return the Redis hash with the "address" and "port" of a host that lends a checkpoint. It expires."""
    return f"{host_key_prefix(host)}loan:{job}:{attempt}"


def telemetry_stream(job: str, attempt: int, node: int = 0) -> str:
    """Return the Redis Stream of telemetry from one host of an attempt.

    The field "b" of an entry is one msgpack `Batch`, "n" its number from 0. The stream is bounded in bytes: if the
    first number is above 0, Redis trimmed older entries.
    """
    return f"meshboard:telemetry:{job}:{attempt}" + (f":{node}" if node else "")


def gang_key(job: str, attempt: int) -> str:
    """Return the Redis hash of a starting gang: the address of each ready member as JSON, by node."""
    return f"meshboard:gang:{job}:{attempt}"


def cancel_key(job: str, attempt: int) -> str:
    """Return the key that exists while an attempt is CANCELLING. The supervisor polls it each second."""
    return f"{CANCEL_KEY_PREFIX}{job}:{attempt}"


def save_key(job: str, attempt: int) -> str:
    """Return the key that asks an attempt to save a checkpoint and stop. The supervisor polls it each second."""
    return f"{cancel_key(job, attempt)}:save"


def requested_timelines_key(job: str, attempt: int) -> str:
    """Return the Redis set of steps whose timeline a user requested. Supervisors poll it each second. It expires."""
    return f"meshboard:wanted:{job}:{attempt}"
