"""Terms and bounds that telemetry items share."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from contracts.fields import MAX_INT64, Count, Rank, ShortText

VERSION: Final = 1
MAX_EVENTS_PER_STEP: Final = 20_000  # per rank
MAX_UNIX_S: Final = float(2**33)  # in 2242; trace readers have 63 bits for nanoseconds
MAX_STEP_US: Final = 10**13  # 115 days
MAX_CHECKPOINTS: Final = 100  # the newest checkpoints of an attempt
# The first steps are no measure of the others: buckets regroup, caches fill, kernels are compiled.
WARMUP_STEPS: Final = 3
SCRIPT_SETUP_STEPS: Final = 2  # first steps of a script; DDP regroups its buckets once as the second step begins
TIMED_STEPS: Final = 500  # last steps whose median is the step time of a finished run
LIVE_STEPS: Final = 50  # last steps whose median is the step time of a running run
SPEED_STEPS: Final = 20  # last steps whose tokens per second are the speed of a running run

Phase = Literal["setup", "step", "eval", "checkpoint", "proof", "teardown"]
Op = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
Axis = Literal["dp", "pp", "cp", "ep", "tp", "world"]
Work = Literal["data", "forward", "backward", "weights", "optimizer", "checkpoint", "eval"]

Label = ShortText  # an Axis, or the name of a process group of a user's script
Column = Annotated[list[Count], Field(max_length=MAX_EVENTS_PER_STEP)]
Times = Annotated[list[Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)]], Field(max_length=MAX_EVENTS_PER_STEP)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=65536)]
