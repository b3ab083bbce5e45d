"""Diagnose runs: what is wrong, which rank waits for which, what it costs, and what to do.

This package is pure: it has no database, no clock, and no torch. docs/explanation/diagnosis.md has the definitions.
"""

from jobs.core.verdict_schema import VerdictPayload
from jobs.runs.diagnosis.diagnosis import Diagnosis
from jobs.runs.diagnosis.planned_run import HostRanks, PlannedRun

__all__ = ["Diagnosis", "HostRanks", "PlannedRun", "VerdictPayload"]
