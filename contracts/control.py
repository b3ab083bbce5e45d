"""What the controller asks of a host, and what a host answers.

Orders travel as JSON Celery arguments on the host's own queue; answers as msgpack `Event`s on
`names.events_stream`. The pair (job, attempt) is the identity everywhere and the attempt number is the
fencing token: a message about a lower attempt than the current one is refused.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.facts import HostFacts, Use
from contracts.fields import (
    Address,
    AttemptNumber,
    CheckpointName,
    Count,
    HostName,
    JobId,
    LogLine,
    Number,
    Plain,
    Rank,
    Seconds,
    Sentence,
    Slot,
    Word,
)
from contracts.loans import Secret
from contracts.telemetry.proof import ProofItem
from contracts.telemetry.results import DryRunItem, MemoryParts, VerdictRow
from contracts.telemetry.steps import Cell, CheckpointItem

VERSION: Final = 1
STOPPED: Final = "the host was stopped"  # why an attempt failed that nothing ailed

Outcome = Literal["succeeded", "failed", "cancelled", "lost"]
Slots = Annotated[list[Slot], Field(max_length=65536)]
RankText = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]
ExitCode = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class Node(TypedDict):
    """A host of a gang, in rank order."""

    host: HostName
    address: Address | Literal[""]  # where the others reach it; "" where the board does not know
    ranks: Annotated[int, Field(ge=1, le=65536)]


class Gang(TypedDict):
    """An attempt on several hosts. Ranks fill node after node."""

    node: Annotated[int, Field(ge=0, le=65535)]  # which one this order is for
    nodes: Annotated[list[Node], Field(min_length=2, max_length=65536)]
    lease_s: Seconds  # ranks end themselves when nothing was heard of the board for so long


class KeptCheckpoint(TypedDict):
    """The newest checkpoint that an earlier attempt told of, and where it was written."""

    name: CheckpointName
    host: HostName
    lent: NotRequired[Secret]  # for node 0: that host, none of this attempt's, sends it to whoever shows this


class LaunchOrder(TypedDict):
    """Start this attempt, or a gang's share of it. Delivering it twice starts it once."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    spec: Plain  # planner.facts.spec.JobSpec as JSON
    slots: Slots  # slot (GPU or CPU rank slot) indices of this host
    expires: Number  # unix seconds by Redis' clock; later the order is not carried out
    gang: NotRequired[Gang]  # of an attempt on several hosts
    checkpoint: NotRequired[KeptCheckpoint]  # the run goes on from it or a later one, or fails: never anew
    owner: NotRequired[Count]  # whose job it is, by number
    variables: NotRequired[list[str]]  # that its project hands it, sealed for this host: `contracts.variables`


class LossPoint(TypedDict):
    """One point of the loss curve."""

    step: Count
    loss: Number
    time: Number


class Measured(TypedDict):
    """Steps of a run as rank 0 timed them, without its first ones."""

    steps: Count
    step_s: Seconds  # the median


class Summary(TypedDict):
    """What stays of an attempt's telemetry when its stream is gone. Cells are each rank's last."""

    steps: Count
    tokens_per_s: Seconds | None
    losses: list[LossPoint]  # thinned to 500 points at most
    eval_losses: list[LossPoint]
    cells: dict[RankText, list[Cell]]  # by rank, as text: JSON keys
    cells_left_out: NotRequired[Count]  # ranks of whose cells some or all found no room: sums of `cells` are not of all
    verdict: dict[RankText, list[VerdictRow]]  # by rank
    measured: NotRequired[Measured]  # of a run that trained on after its first steps
    ran_steps: NotRequired[Count]  # that cells of phase "step" are of, where not all: of a resumed run, of a script
    checkpoints: NotRequired[list[CheckpointItem]]  # the newest last, at most 100
    dry_runs: NotRequired[list[DryRunItem]]  # by rank, of a dry run
    profile: NotRequired[Plain]  # of a calibration: `planner.hardware.profile.HostProfile` as JSON
    peak_bytes: NotRequired[dict[RankText, Count]]  # by rank, as its verdict told it
    memory: NotRequired[dict[RankText, MemoryParts]]  # the same
    proof: NotRequired[ProofItem]  # the last; of a run that ended before it, none
    lab: NotRequired[Plain]  # of a lab: `planner.facts.collectives.LabResult` as JSON


class ExitReport(TypedDict):
    """How an attempt ended: the supervisor's exit.json."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    outcome: Outcome
    reason: Sentence  # one sentence for people
    exit_code: ExitCode | None
    rank: Rank | None  # the first rank that failed
    signal: Word | None  # SIGKILL, SIGSEGV, ...
    log_tail: list[LogLine]  # the last lines that rank (or the launcher) wrote
    started: Number
    finished: Number
    failed_at: NotRequired[Number]  # when that rank failed, unix seconds by Redis' clock
    summary: Summary | None
    lost_peer: NotRequired[bool]  # it only noticed that another rank was gone: the cause is elsewhere
    preempted: NotRequired[bool]  # its machines were taken from it, by an engine that is not ours


class AttemptReport(TypedDict):
    """What a host knows of one attempt."""

    job: JobId
    attempt: AttemptNumber
    state: Literal["starting", "running", "exited"]
    slots: Slots  # what it holds until it has exited
    exit: NotRequired[ExitReport]  # with "exited"; in a heartbeat left for a later one when there are many
    note: NotRequired[Sentence]  # what a person should know: "rank 1 is stopped"
    checkpoint: NotRequired[CheckpointName]  # the newest that is complete


class HostEvent(TypedDict):
    """Heartbeat of a host worker, every 5 s and at start. `attempts`: all not yet acknowledged.

    `sequence` grows by one with each heartbeat of an incarnation, a start of the worker: a lower number, or an
    incarnation that began earlier, is old news.
    """

    kind: Literal["host"]
    v: Literal[1]
    host: HostName
    boot_id: Word
    incarnation: Word
    began: Number  # when this incarnation started, unix seconds by Redis' clock
    sequence: Count
    time: Number
    slots: Annotated[int, Field(ge=1, le=65536)]
    device: Literal["cpu", "cuda"]
    device_name: Word
    memory_bytes: Count  # per slot: GPU memory, or the machine's memory divided by its slots
    attempts: list[AttemptReport]
    note: NotRequired[Sentence]  # what a person should know of this host: "jobs run as root: ..."
    address: NotRequired[Address]  # where other hosts reach it
    facts: NotRequired[HostFacts]  # with the first heartbeat, and when they are a minute old
    use: NotRequired[Use]


class AttemptEvent(TypedDict):
    """Sent by the supervisor: a change of state, and a heartbeat every 5 s."""

    kind: Literal["attempt"]
    v: Literal[1]
    host: HostName
    time: Number
    report: AttemptReport


Event = Annotated[HostEvent | AttemptEvent, Field(discriminator="kind")]
