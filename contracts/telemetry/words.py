"""Words and bounds that all items share."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from contracts.fields import LARGEST, Count, Rank, Word

VERSION: Final = 1
MOST_EVENTS: Final = 20_000  # of one step of one rank
LATEST: Final = float(2**33)  # unix seconds, in 2242: readers of traces have 63 bits for nanoseconds
LONGEST_STEP_US: Final = 10**13  # 115 days
MOST_CHECKPOINTS: Final = 100  # of an attempt that are remembered, the newest
FIRST_STEPS: Final = 3  # of a run, no measure of the others: buckets regroup, caches fill, kernels are compiled
SCRIPT_SETUP_STEPS: Final = 2  # of a script, the first: DDP regroups its buckets as the second begins, once
TIMED_STEPS: Final = 500  # last steps whose median is the step time of a run that ended
LIVE_STEPS: Final = 50  # last steps whose median is the step time of a running run
SPEED_STEPS: Final = 20  # the last, whose speed it tells: their tokens over their time

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

Label = Word  # an Axis; in a user's own script, which has none, the words for a group
Column = Annotated[list[Count], Field(max_length=MOST_EVENTS)]
Times = Annotated[list[Annotated[int, Field(ge=-LARGEST, le=LARGEST)]], Field(max_length=MOST_EVENTS)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=65536)]
