"""Orders of the controller to hosts, and reports of hosts to the controller.

Orders travel as JSON Celery arguments on the queue of the host. Reports travel as msgpack `Event`s on
`names.events_stream`. The pair (job, attempt) identifies an attempt everywhere. The attempt number is the fencing
token: a message with a lower number than the current attempt is refused.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.archives import MAX_ARCHIVE_BYTES
from contracts.fields import (
    Address,
    AttemptNumber,
    CheckpointName,
    Count,
    HostName,
    JobId,
    JsonObject,
    LogLine,
    Number,
    Rank,
    Seconds,
    Sha256,
    ShortText,
    Slot,
    Text,
    TraceId,
)
from contracts.hosts import HostFacts, HostUsage
from contracts.telemetry.items import Cell, CheckpointItem
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow

VERSION: Final = 1
ALLOCATION_ORDER_VERSION: Final = 1
HOST_STOPPED_REASON: Final = "the host was stopped"  # the reason of an attempt that failed without an error
# FOLDER/runs/ID.warned exists if Slurm warned the batch script of job ID that the job ends soon.
END_WARNING_SUFFIX: Final = "warned"

Outcome = Literal["succeeded", "failed", "cancelled", "lost"]
# Stage of a failure that the host caused. Only the host itself decides that a launch failed because of the host, or
# that its machine restarted. That ranks failed because of the host follows from their logs, which a job can forge. If
# the hosts of a gang did not start together, the host that reports it is not the cause.
HostFault = Literal["launch", "ranks", "restart", "gang"]
Slots = Annotated[list[Slot], Field(max_length=65536)]
RankText = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]  # a rank as a JSON key
ExitCode = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Secret = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Node(TypedDict):
    """A host of a gang, in rank order."""

    host: HostName
    address: Address | Literal[""]  # address for the other hosts, or "" if the board does not know it
    ranks: Annotated[int, Field(ge=1, le=65536)]


class Gang(TypedDict):
    """The hosts of an attempt on several hosts. Ranks fill one node after another."""

    node: Annotated[int, Field(ge=0, le=65535)]  # index of the node that receives this order
    nodes: Annotated[list[Node], Field(min_length=2, max_length=65536)]
    lease_s: Seconds  # ranks exit when the board is silent for this time


class ResumeCheckpoint(TypedDict):
    """The newest checkpoint that an earlier attempt reported, and its host.

    The run resumes from this or a later checkpoint. The run fails if it has neither.
    """

    name: CheckpointName
    host: HostName
    lent: NotRequired[Secret]  # for node 0: the host of another attempt sends the checkpoint for this secret


class UploadOrder(TypedDict):
    """The uploaded archive of a script, which each host downloads from the board.

    The order in the outbox has no secret.
    """

    sha256: Sha256
    size: Annotated[int, Field(ge=1, le=MAX_ARCHIVE_BYTES)]
    secret: NotRequired[Secret]


class LaunchOrder(TypedDict):
    """Start this attempt, or the ranks of one host of a gang. A second delivery has no effect."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    spec: JsonObject  # planner.facts.spec.JobSpec as JSON
    slots: Slots  # indices of GPUs or CPU rank slots of this host
    expires: Number  # unix seconds of the Redis clock, after which the host ignores the order
    gang: NotRequired[Gang]  # of an attempt on several hosts
    checkpoint: NotRequired[ResumeCheckpoint]
    owner: NotRequired[Count]  # user ID of the owner
    variables: NotRequired[list[str]]  # variables of the project, encrypted for this host (`contracts.security`)
    upload: NotRequired[UploadOrder]  # of a script that the owner uploaded
    trace: NotRequired[TraceId]  # of the request that submitted the job


class AllocationOrder(TypedDict):
    """Start this attempt in an allocation of Slurm, and report to the board over HTTPS.

    The supervisors on all nodes read the same order from standard input.
    """

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    spec: JsonObject  # planner.facts.spec.JobSpec as JSON
    nodes: Annotated[int, Field(ge=1, le=65536)]
    slots: Annotated[int, Field(ge=1, le=65536)]  # per node
    board: Annotated[str, Field(max_length=2000)]  # URL
    certificates: Annotated[str, Field(max_length=2**20)]  # PEM, or empty to use the certificates of the node
    token: Annotated[str, Field(max_length=200)]  # API token of the run of this attempt
    folder: Annotated[str, Field(max_length=4096)]  # shared by all nodes
    lease_s: Seconds  # ranks on several nodes exit when the board is silent for this time
    checkpoint: NotRequired[ResumeCheckpoint]
    upload: NotRequired[UploadOrder]
    trace: NotRequired[TraceId]  # of the request that submitted the job


class LendOrder(TypedDict):
    """Send the newest checkpoint of a job once to the client that presents the secret.

    The board gives the secret to the lending host and to the first host of the attempt. The lending host publishes its
    address at `names.loan_key`. The supervisor of the first host then passes a `LoanAddress` to rank 0.
    """

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber  # the attempt that resumes from the checkpoint
    secret: Secret
    expires: Number  # unix seconds of the Redis clock, after which the host ignores the order
    owner: NotRequired[Count]  # user ID of the owner


class LoanAddress(TypedDict):
    """Address from which rank 0 downloads a checkpoint."""

    host: HostName
    address: Address
    port: Annotated[int, Field(ge=1, le=65535)]
    secret: Secret


class LossPoint(TypedDict):
    """One point of the loss curve."""

    step: Count
    loss: Number
    time: Number


class StepTiming(TypedDict):
    """Step time that rank 0 measured after the warm-up steps."""

    steps: Count
    step_s: Seconds  # median


class Summary(TypedDict):
    """Summary of the telemetry of an attempt, which remains after its stream is deleted."""

    steps: Count
    tokens_per_s: Seconds | None
    losses: list[LossPoint]  # thinned to at most 500 points
    eval_losses: list[LossPoint]
    cells: dict[RankText, list[Cell]]  # last cells of each rank
    cells_left_out: NotRequired[Count]  # ranks with missing cells, so that sums of `cells` are incomplete
    verdict: dict[RankText, list[VerdictRow]]
    measured: NotRequired[StepTiming]  # of a run with more steps than the warm-up
    samples_per_s: NotRequired[Seconds]  # of a script whose samples are known
    samples: NotRequired[Count]  # per step, of such a script
    ran_steps: NotRequired[Count]  # steps of the "step" cells, if fewer than `steps`: of a resumed run or a script
    checkpoints: NotRequired[list[CheckpointItem]]  # at most 100, the newest last
    dry_runs: NotRequired[list[DryRunItem]]  # of a dry run, by rank
    profile: NotRequired[JsonObject]  # of a calibration: `planner.hardware.profile.HostProfile` as JSON
    peak_bytes: NotRequired[dict[RankText, Count]]  # from the verdict of each rank
    memory: NotRequired[dict[RankText, MemoryParts]]  # from the verdict of each rank
    proof: NotRequired[ProofItem]  # the last, if the run sent one
    lab: NotRequired[JsonObject]  # of a lab: `planner.facts.collectives.LabResult` as JSON


class KillEvidence(TypedDict):
    """Out-of-memory kills by the kernel during an attempt that SIGKILL ended."""

    oom_kills: Count | None  # by the out-of-memory killer, None if the host cannot read them
    text: Text  # one sentence for people


class ExitReport(TypedDict):
    """End of an attempt, which the supervisor writes to exit.json."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    outcome: Outcome
    reason: Text  # one sentence for people
    exit_code: ExitCode | None
    rank: Rank | None  # the first rank that failed
    signal: ShortText | None  # SIGKILL, SIGSEGV, ...
    log_tail: list[LogLine]  # last lines of this rank, or of the launcher
    started: Number
    finished: Number
    failed_at: NotRequired[Number]  # time when this rank failed, unix seconds of the Redis clock
    summary: Summary | None
    error: NotRequired[Text]  # the error that ended the rank, from its log: "ValueError: boom"
    first_error: NotRequired[Text]  # the exception that led to `error`
    evidence: NotRequired[list[LogLine]]  # log lines that show these errors
    kill: NotRequired[KillEvidence]  # of a rank that SIGKILL ended
    lost_peer: NotRequired[bool]  # the rank only lost another rank, so the cause is elsewhere
    preempted: NotRequired[bool]  # another scheduler took the machines away
    host_fault: NotRequired[HostFault]  # of a failure that the host caused, so another host can run the job


class AttemptReport(TypedDict):
    """State of one attempt on a host."""

    job: JobId
    attempt: AttemptNumber
    state: Literal["starting", "running", "exited"]
    slots: Slots  # occupied until the attempt exits
    exit: NotRequired[ExitReport]  # with "exited"; a heartbeat with many attempts defers some of them
    note: NotRequired[Text]  # hint for people: "rank 1 is stopped"
    checkpoint: NotRequired[CheckpointName]  # the newest complete one


class HostEvent(TypedDict):
    """Heartbeat of a host worker, sent every 5 s and at start, with all attempts not yet acknowledged.

    Each start of the worker is an incarnation. `sequence` increases by one with each heartbeat of an incarnation. The
    controller ignores lower numbers and earlier incarnations.
    """

    kind: Literal["host"]
    v: Literal[1]
    host: HostName
    boot_id: ShortText
    incarnation: ShortText
    began: Number  # start of this incarnation, unix seconds of the Redis clock
    sequence: Count
    time: Number
    slots: Annotated[int, Field(ge=1, le=65536)]
    device: Literal["cpu", "cuda"]
    device_name: ShortText
    memory_bytes: Count  # per slot: GPU memory, or the memory of the machine divided by its slots
    attempts: list[AttemptReport]
    note: NotRequired[Text]  # hint for people: "jobs run as root: ..."
    problem: NotRequired[Text]  # why the host cannot start jobs now, for people
    address: NotRequired[Address]  # address for the other hosts
    facts: NotRequired[HostFacts]  # with the first heartbeat, then about once per minute
    use: NotRequired[HostUsage]


class AttemptEvent(TypedDict):
    """Report of a supervisor, sent at each change of state and every 5 s."""

    kind: Literal["attempt"]
    v: Literal[1]
    host: HostName
    time: Number
    report: AttemptReport


Event = Annotated[HostEvent | AttemptEvent, Field(discriminator="kind")]


def get_node_index(order: LaunchOrder) -> int:
    """Return the index of this host in the gang, or 0 without a gang."""
    return order["gang"]["node"] if "gang" in order else 0


def get_local_ranks(order: LaunchOrder) -> range:
    """Return the global ranks of this host."""
    first = 0
    if "gang" in order:
        first = sum(node["ranks"] for node in order["gang"]["nodes"][: order["gang"]["node"]])
    return range(first, first + len(order["slots"]))


def get_world_size(order: LaunchOrder) -> int:
    """Return the number of ranks on all hosts."""
    if "gang" not in order:
        return len(order["slots"])
    return sum(node["ranks"] for node in order["gang"]["nodes"])
