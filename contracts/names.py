"""Celery task names, queue names and Redis keys shared by the controller, the web and the hosts."""

from __future__ import annotations

TASK_LAUNCH = "workers.launch"  # argument: LaunchOrder; starts a detached supervisor and returns
TASK_ACKNOWLEDGE = "workers.acknowledge"  # arguments: job, attempt; the exit report was stored
TASK_TELL_AGAIN = "workers.tell_again"  # arguments: job, attempt; how it ended is not stored, or no longer
TASK_READ_LOG = "workers.read_log"  # argument: logs.LogOrder; one part of a log, answered at `log_key`
TASK_LEND = "workers.lend"  # argument: loans.LendOrder; a checkpoint's files, from where `loan_key` says

OLD_EVENTS_STREAM = "meshboard:events"  # all hosts' once; heard for as long as some have an older version
SAVE_FILE = "save"  # beside the telemetry socket: the run is to save a checkpoint and stop
LOAN_FILE = "loan"  # beside it too: a loans.Loan as JSON, once its host has said where
CANCEL_KEYS = "meshboard:cancel:"


def host_keys(host: str) -> str:
    """What every Redis key begins with that is this host's alone; no host's name holds a colon."""
    return f"meshboard:host:{host}:"


def events_stream(host: str) -> str:
    """What a host says to the controller: "b" holds one msgpack Event, "s" its `signing.signature`."""
    return f"{host_keys(host)}events"


def host_queue(host: str) -> str:
    """Name of the Celery queue that only this host's worker reads."""
    return f"{host_keys(host)}orders"


def log_key(host: str, question: str) -> str:
    """Redis list with the one answer to a `logs.LogOrder`: signature and msgpack of a `logs.LogPart`. It expires."""
    return f"{host_keys(host)}log:{question}"


def loan_key(host: str, job: str, attempt: int) -> str:
    """Redis hash of a host that lends an attempt a checkpoint: "address" and "port" where it does. It expires."""
    return f"{host_keys(host)}loan:{job}:{attempt}"


def telemetry_stream(job: str, attempt: int, node: int = 0) -> str:
    """Redis Stream of one member; an entry's field "b" holds one msgpack `Batch`, "n" its number from 0.

    It is bounded in bytes: where the first entry's number is not 0, older ones were trimmed.
    """
    return f"meshboard:telemetry:{job}:{attempt}" + (f":{node}" if node else "")


def gang_key(job: str, attempt: int) -> str:
    """Redis hash of a gang that starts: by node, JSON of where a member is that is ready."""
    return f"meshboard:gang:{job}:{attempt}"


def cancel_key(job: str, attempt: int) -> str:
    """Set by the controller while an attempt is CANCELLING; its supervisor polls it each second."""
    return f"{CANCEL_KEYS}{job}:{attempt}"


def save_key(job: str, attempt: int) -> str:
    """Set by the controller while an attempt is to save a checkpoint and stop; its supervisor polls it each second."""
    return f"{cancel_key(job, attempt)}:save"


def wanted_key(job: str, attempt: int) -> str:
    """Redis set of the steps whose timeline somebody asked to see; supervisors poll it each second. It expires."""
    return f"meshboard:wanted:{job}:{attempt}"
