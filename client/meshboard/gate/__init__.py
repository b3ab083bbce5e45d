"""Gate for CI: compare finished jobs with limits and baselines."""

from meshboard.gate.checks import (
    BaselineRuns,
    CheckResult,
    baseline_from_branch,
    baseline_from_job,
    check_limits,
    check_same_baselines,
    check_same_spec,
    explain_excluded,
)
from meshboard.gate.measures import (
    Limit,
    LimitError,
    MissingValueError,
    RunMeasures,
    format_value,
    get_unit,
    parse_facts,
    parse_job,
    parse_limit,
)

__all__ = [
    "BaselineRuns",
    "CheckResult",
    "Limit",
    "LimitError",
    "MissingValueError",
    "RunMeasures",
    "baseline_from_branch",
    "baseline_from_job",
    "check_limits",
    "check_same_baselines",
    "check_same_spec",
    "explain_excluded",
    "format_value",
    "get_unit",
    "parse_facts",
    "parse_job",
    "parse_limit",
]
