"""What a supervisor inside somebody's allocation (Slurm's) is told on its standard input: the same on every node."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.control import KeptCheckpoint
from contracts.fields import AttemptNumber, JobId, Plain, Seconds

VERSION: Final = 1
WARNED: Final = "warned"  # FOLDER/runs/ID.warned, of Slurm's id: the batch script was told that its job ends soon


class AllocationOrder(TypedDict):
    """Start this attempt on the nodes there are, and speak for it to the board over HTTPS."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    spec: Plain  # planner.facts.spec.JobSpec as JSON
    nodes: Annotated[int, Field(ge=1, le=65536)]
    slots: Annotated[int, Field(ge=1, le=65536)]  # of each node
    board: Annotated[str, Field(max_length=2000)]  # its address
    certificates: Annotated[str, Field(max_length=2**20)]  # PEM; empty for those the node trusts by itself
    token: Annotated[str, Field(max_length=200)]  # of this attempt's run
    folder: Annotated[str, Field(max_length=4096)]  # which all nodes share
    lease_s: Seconds  # ranks on several nodes end themselves when nothing was heard of the board for so long
    checkpoint: NotRequired[KeptCheckpoint]  # the run goes on from it or a later one, or fails: never anew
