"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from meshboard.answers.specs import StoredSpec


class ExcludedRun(TypedDict):
    """Describe a run of the branch that is not comparable with the newest run."""

    job: str
    name: str
    by: str
    at: str
    why: str
    """Spec fields in which this job differs from the newest job."""


class PlanDifference(TypedDict):
    """Hold the absolute differences between measured and predicted traffic, summed over ranks and axes."""

    bytes: int
    calls: int


class StepLoss(TypedDict):
    """Hold the training loss after a step."""

    step: int
    loss: float


class CollectiveTraffic(TypedDict):
    """Hold the payload bytes and calls per step over all ranks."""

    axis: str
    op: str
    bytes: float
    calls: float


class RunMeasurements(TypedDict):
    """Hold the figures of a run. Unknown figures are null."""

    steps: int
    """Number of steps in the means of bytes and calls, without the first two steps of a script."""
    step_s: float | None
    """Median step time of rank 0, without the first three steps."""
    tokens_per_s: float | None
    peak_bytes: int | None
    """Peak memory of the rank with the highest peak."""
    losses: list[StepLoss]
    sent: list[CollectiveTraffic]
    apart: PlanDifference | None
    """Difference between measured and predicted traffic. null if a rank did not compare the traffic."""
    last_step: NotRequired[int]
    """Number of the last step. Absent for runs of older versions."""
    no_peak: NotRequired[str]
    """Reason why `peak_bytes` is null."""
    no_sent: NotRequired[str]
    """Reason why `sent` is empty."""


class BaselineRunDetail(TypedDict):
    """Describe a run with which others are compared, and its figures."""

    job: str
    name: str
    by: str
    at: str
    facts: RunMeasurements


class Baseline(TypedDict):
    """Describe the baseline of a branch. Runs are sorted from newest to oldest."""

    project: str
    branch: str
    spec: StoredSpec | None
    """Spec fields of the newest job that affect the results. null if they are not stored."""
    runs: list[BaselineRunDetail]
    left_aside: list[ExcludedRun]
    """Runs with a different spec, which the mean of `runs` excludes."""


class BranchBrief(TypedDict):
    """Describe a branch in a list by its number of runs and the newest run."""

    branch: str
    runs: int
    job: str
    name: str
    by: str
    at: str


class AuditRow(TypedDict):
    """An action of a user."""

    id: int
    at: str
    who: str
    address: str
    what: str
    kind: str
    name: str
    before: Any
    after: Any


class UploadDetail(TypedDict):
    """An upload of a script, with the Python files that a job can run."""

    id: str
    name: str
    size: int
    """Size of the archive, in bytes."""
    sha256: str
    """SHA-256 of the archive for the spec field `script.upload`. Empty until it is complete."""
    files: int
    """Number of files in the archive."""
    unpacked_bytes: int
    sent: str
    scripts: list[str]
    """Python files nearest to the top, at most 200."""
