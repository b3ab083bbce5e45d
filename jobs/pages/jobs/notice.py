"""The notice of a job page: how the job ended, or lost contact. `js/job/header.js` shows the same notice live."""

from __future__ import annotations

from typing import NamedTuple

from jobs.core.job_details import JobDetail
from jobs.models import Status

MAX_REASON = 160  # characters


class Notice(NamedTuple):
    """A message with its color."""

    tone: str
    text: str


def notice_of(job: JobDetail, *, has_verdict: bool) -> Notice | None:
    """Return the notice of a job, or None. `has_verdict`: a verdict on the page shows failures."""
    last = job["history"][-1]["reason"] if job["history"] else ""
    status = job["status"]
    if status == Status.CANCELLING and job["wait_reason"]:
        return Notice("info", f"Canceling: {job['wait_reason']}")
    if status == Status.UNREACHABLE:
        return Notice("warn", f"{_capital(last)}. Training may continue. The page updates when contact returns.")
    reason = (job["exit"] or {}).get("reason") or last or "the run ended without a report"
    if status == Status.CANCELLED:
        named = reason if reason.startswith(status) else f"{status}: {reason}"
        return Notice("warn", _capital(named))
    if status in (Status.FAILED, Status.LOST) and not has_verdict:
        return Notice("bad", _failure(job, status, reason))
    return None


def _failure(job: JobDetail, status: str, reason: str) -> str:
    exit = job["exit"] or {}
    facts = [] if exit.get("rank") is None else [f"rank {exit['rank']}"]
    if exit.get("signal"):
        facts.append(str(exit["signal"]))
    elif exit.get("exit_code"):
        facts.append(f"exit code {exit['exit_code']}")
    short = reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 1]}…"
    return f"{_capital(status)}: {short}" + (f" ({', '.join(facts)})" if facts else "")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
