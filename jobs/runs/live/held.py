"""What a view and the layer round it (`jobs.api.http.patient`) say to each other of a request that is held.

A view that has nothing to answer yet leaves a wish in the request's scope and answers 204, which nobody sees. The layer
waits, which costs no thread, and asks the view again: when something changed, now and then whether the user may still
see it, and a last time when it must answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

KEY = "meshboard.held"


class Standing(NamedTuple):
    """How a job stands: its status, its attempt, and what a diagnosis says of that."""

    status: str
    attempt: int
    verdict: dict[str, str] | None = None


class Position(NamedTuple):
    """How far a reader of events is: the last change of status (0: none), and of an attempt its last step and where in
    each node's stream."""

    change: int = 0
    attempt: int = 0
    step: int = 0
    streams: tuple[tuple[int, str], ...] = ()


class OneLog(NamedTuple):
    """A log of an attempt: its node, and its rank there as its items have it (-1: the launcher)."""

    attempt: int
    node: int
    rank: int


class UntilReached(NamedTuple):
    """Ask again when the job no longer stands so, and after `timeout_s`."""

    job: str
    seen: Standing
    timeout_s: float


class Follow(NamedTuple):
    """Tell the job's events from a position on; of `log` alone where that is given; with `live_s` how it goes from so
    many seconds back on: what it sends each second, and no logs."""

    job: str
    seen: Standing
    after: Position
    log: OneLog | None = None
    live_s: int | None = None


@dataclass
class Held:
    """`again`: the view was asked before; `last`: it must answer now. `user`: who asks."""

    again: bool = False
    last: bool = False
    user: int = 0
    wish: UntilReached | Follow | None = None


def held_by(request: Any) -> Held | None:
    """None where nobody would ask again: another server, or a request that is no GET."""
    found: Held | None = getattr(request, "scope", {}).get(KEY)
    return found if request.method == "GET" else None
