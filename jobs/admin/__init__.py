"""Django admin of jobs, hosts, the queue, and accounts."""

from __future__ import annotations

from jobs.admin import hosts, jobs
from jobs.admin.accounts import register_accounts

__all__ = ["hosts", "jobs", "projects"]

register_accounts()
