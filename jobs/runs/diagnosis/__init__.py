"""Reads what all members of an attempt tell, and says what is wrong, who waits for whom, what it costs and what to do.

Pure: no database, no clock of its own, no torch. docs/explanation/diagnosis.md has the definitions and the thresholds.
"""

from jobs.core.verdict_schema import Told
from jobs.runs.diagnosis.diagnosis import Diagnosis
from jobs.runs.diagnosis.run import Member, Run

__all__ = ["Diagnosis", "Member", "Run", "Told"]
