"""What the streams of an attempt add up to: kept beside its tables, and gone on from."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from contracts.telemetry.health import ProcessItem, StallItem
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from contracts.telemetry.steps import Cell, CheckpointItem


class RankState(TypedDict):
    """What one rank's items add up to. `exact` are its cells of phase "step" as step `ran` of this run ended."""

    node: int
    phase: str | None
    dropped: int
    ran: int
    exact: list[Cell]
    cells: dict[str, Cell]
    gap: tuple[float, float] | None  # the last one of its stream
    stale: list[str]  # cells not heard of since


class Progress(TypedDict):
    """As `webapp/static/js/store.js` keeps it. `rate`: tokens a second of rank 0's last steps."""

    step: int
    steps: int | None
    step_s: NotRequired[float]
    tokens: NotRequired[int]
    time: NotRequired[float]
    learning_rate: NotRequired[float]
    grad_norm: NotRequired[float | None]
    rate: float | None


class Started(TypedDict):
    """A stage of a start that was over. `rank` -1: of a member as a whole."""

    node: int
    rank: int
    stage: str
    time: float


class State(TypedDict):
    """What the streams of an attempt add up to."""

    ranks: dict[int, RankState]
    progress: Progress | None
    step_times: list[float]  # of rank 0's last steps
    verdicts: dict[int, list[VerdictRow]]
    peaks: dict[int, int]
    memory: NotRequired[dict[int, MemoryParts]]  # an older version kept none
    proof: ProofItem | None
    dry_runs: dict[int, DryRunItem]
    checkpoints: list[CheckpointItem]
    starts: list[Started]
    standing: dict[int, StallItem]  # ranks that stand still
    processes: dict[int, ProcessItem]  # of ranks that do not speak
    resumed: bool
    faulty_step: int
    refused: int  # items that made no sense
    lost: bool  # some part of some stream


def new_state() -> State:
    return {
        "ranks": {},
        "progress": None,
        "step_times": [],
        "verdicts": {},
        "peaks": {},
        "proof": None,
        "dry_runs": {},
        "checkpoints": [],
        "starts": [],
        "standing": {},
        "processes": {},
        "resumed": False,
        "faulty_step": 0,
        "refused": 0,
        "lost": False,
    }
