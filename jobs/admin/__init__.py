"""The admin: jobs, hosts, queue and people. Django looks here; each room registers its own."""

from __future__ import annotations

from jobs.admin import hosts, jobs, projects
from jobs.admin.others import write_down_others

__all__ = ["hosts", "jobs", "projects"]

write_down_others()
