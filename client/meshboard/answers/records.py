"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from meshboard.answers.specs import StoredSpec


class LeftAside(TypedDict):
    """A run of the branch that has no mean with its newest."""

    job: str
    name: str
    by: str
    at: str
    why: str
    """in which fields it ran another spec than the newest"""


class Apart(TypedDict):
    """Measured from predicted, summed over all ranks, axes and collectives without their signs."""

    bytes: int
    calls: int


class LossAt(TypedDict):
    """Training loss after a step."""

    step: int
    loss: float


class Sent(TypedDict):
    """Of a step, all ranks together; payload bytes."""

    axis: str
    op: str
    bytes: float
    calls: float


class Facts(TypedDict):
    """A run's figures; null what it did not tell."""

    steps: int
    """that its bytes and calls are means of: a script's first two are set-up"""
    step_s: float | None
    """the median of rank 0's steps without the first three"""
    tokens_per_s: float | None
    peak_bytes: int | None
    """of the fullest rank"""
    losses: list[LossAt]
    sent: list[Sent]
    apart: Apart | None
    """null where not all ranks compared themselves with a plan"""
    last_step: NotRequired[int]
    """after which the run ended; of older ones it is not known"""
    no_peak: NotRequired[str]
    """the same of `peak_bytes`"""
    no_sent: NotRequired[str]
    """why `sent` is empty, where ranks counted and not all told"""


class KeptRun(TypedDict):
    """A run that builds are held to, and what it measured."""

    job: str
    name: str
    by: str
    at: str
    facts: Facts


class Baseline(TypedDict):
    """Of a branch, the newest run first: those that ran what the newest ran, and the others."""

    project: str
    branch: str
    spec: StoredSpec | None
    """of the newest's, what its figures hang on; null where it was not kept"""
    runs: list[KeptRun]
    left_aside: list[LeftAside]
    """kept, and in no mean with those of `runs`"""


class BranchBrief(TypedDict):
    """One branch of a list: how many runs are kept of it, of whatever spec, and the newest."""

    branch: str
    runs: int
    job: str
    name: str
    by: str
    at: str


class AuditRow(TypedDict):
    """What a person did."""

    id: int
    at: str
    who: str
    address: str
    what: str
    kind: str
    name: str
    before: Any
    after: Any
