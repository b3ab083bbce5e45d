"""The moments of a schedule at which a rank can hold most, for any sizes of its tensors.

The memory at the start of an action is a sum: chunks in flight, chunks whose weight gradients are pending, effects of
the first and last actions of a chunk, and messages. So each schedule is walked once. A moment is dropped when another
one exceeds it in every term.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from operator import ge
from typing import NamedTuple

from planner.facts.layout import get_chunk_indices
from planner.facts.pipeline_messages import get_chunk_stages, order_requests
from planner.facts.schedules import Action, build_actions, splits_backward
from planner.facts.spec import Layout, Schedule
from planner.facts.validation import format_count


class ActionType(NamedTuple):
    """An action as far as memory is concerned: F, B (also I), or W of a kind of chunk.

    `chunk` indexes the kinds of chunk of the rank. `first` and `last` mark the first and last action of the step for
    one chunk. `frees`: the step no longer needs the chunk's gathered weights afterwards.
    """

    kind: str
    chunk: int
    first: bool
    last: bool
    frees: bool = False


class Moment(NamedTuple):
    """The state of a rank when an action starts. Tuples without names are indexed by kind of chunk.

    Attributes:
        flight: forwards whose backward has not run.
        pending: backwards whose weight gradients are not computed.
        passed: how often each first or last action has run.
        messages: messages that only the pipeline holds.
        shared: hidden states and gradients of messages that a chunk holds too.
    """

    action: ActionType
    flight: tuple[int, ...]
    pending: tuple[int, ...]
    passed: tuple[tuple[ActionType, int], ...]
    messages: int
    shared: tuple[int, int]

    @property
    def words(self) -> str:
        """The moment as a phrase for users."""
        name = {"F": "a forward", "B": "a backward", "W": "a backward of weights"}[self.action.kind]
        which = "the step's first" if self.action.first else "the step's last" if self.action.last else "a later one"
        waiting = f", {sum(self.pending)} whose weight gradients are not computed yet" if any(self.pending) else ""
        return f"in {name} ({which}) with {format_count(sum(self.flight), 'chunk')} in flight{waiting}"


class StageSchedule(NamedTuple):
    """A schedule on one pipeline stage.

    `kinds` holds the kind of each chunk of the stage. `frees_forward`: the last forward of a chunk frees weights.
    """

    schedule: Schedule
    pp: int
    virtual_stages: int
    stage: int
    kinds: tuple[int, ...]
    frees_forward: bool = False

    @property
    def layout(self) -> Layout:
        """A layout with this schedule."""
        return Layout(pp=self.pp, schedule=self.schedule, virtual_stages=self.virtual_stages)


def find_peaks(schedule: StageSchedule, micro_batches: int) -> tuple[Moment, ...]:
    """Return the moments that no other moment of the step exceeds."""
    return _find_peaks(schedule, limit_micro_batches(schedule, micro_batches))


@cache
def _find_peaks(schedule: StageSchedule, micro_batches: int) -> tuple[Moment, ...]:
    return _drop_exceeded(_walk(schedule, micro_batches))


def find_peaks_of_stages(schedule: StageSchedule, stages: tuple[int, ...], micro_batches: int) -> tuple[Moment, ...]:
    """Return the highest moments of all `stages`, which hold equal parts of the model.

    First and last actions come last: their effects take longer to compute, and the others may already exceed a limit.
    """
    return _find_peaks_of_stages(schedule, stages, limit_micro_batches(schedule, micro_batches))


@cache
def _find_peaks_of_stages(schedule: StageSchedule, stages: tuple[int, ...], micro_batches: int) -> tuple[Moment, ...]:
    several = [_find_peaks(schedule._replace(stage=stage), micro_batches) for stage in stages]
    highest = _drop_exceeded(chain.from_iterable(several)) if len(several) > 1 else several[0]
    return tuple(sorted(highest, key=lambda moment: moment.action.first or moment.action.last))


@cache
def find_flights(schedule: StageSchedule, stages: tuple[int, ...], micro_batches: int) -> frozenset[tuple[int, ...]]:
    """Return the chunks in flight at the highest moments of all `stages`."""
    return frozenset(moment.flight for moment in find_peaks_of_stages(schedule, stages, micro_batches))


def _drop_exceeded(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    groups: dict[tuple[ActionType, tuple[tuple[ActionType, int], ...]], dict[tuple[int, ...], Moment]] = {}
    for moment in moments:
        group = groups.setdefault((moment.action, moment.passed), {})
        terms = (moment.messages, *moment.flight, *moment.pending)
        if terms in group or any(all(map(ge, other, terms)) for other in group):
            continue
        for other in [other for other in group if all(map(ge, terms, other))]:
            del group[other]
        group[terms] = moment
    return tuple(moment for group in groups.values() for moment in group.values())


def limit_micro_batches(schedule: StageSchedule, micro_batches: int) -> int:
    """Return how many micro-batches show every moment: most schedules repeat after a few times pp."""
    pp, chunks = schedule.pp, schedule.virtual_stages
    if schedule.schedule in ("gpipe", "looped_bfs"):
        return micro_batches
    if schedule.schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and chunks > 1:
        return min(micro_batches, (3 if schedule.schedule == "interleaved_1f1b" else 4) * pp)
    return min(micro_batches, (2 * pp if chunks > 1 else pp) + 3)


def _walk(schedule: StageSchedule, micro_batches: int) -> Iterator[Moment]:
    """Yield each different moment of the step in order."""
    layout, stage = schedule.layout, schedule.stage
    own = get_chunk_indices(layout, stage) if layout.pp > 1 else (0,)
    kind_of = dict(zip(own, schedule.kinds, strict=True))
    flight, pending = [0] * (max(schedule.kinds) + 1), [0] * (max(schedule.kinds) + 1)
    started = {(kind, chunk): 0 for kind in "FBW" for chunk in own}
    types: dict[tuple[str, int, bool, bool, bool], ActionType] = {}
    passed: dict[ActionType, int] = {}
    passed_items: tuple[tuple[ActionType, int], ...] = ()
    messages = _Messages(schedule, micro_batches)
    has_split_backward = splits_backward(layout)
    seen: set[tuple[object, ...]] = set()

    def start(kind: str, chunk: int, *, is_whole: bool) -> Moment | None:
        """Count an action and return its moment if it is new."""
        nonlocal passed_items
        count = started[kind, chunk]
        started[kind, chunk] = count + 1
        is_last = (kind != "F" or schedule.frees_forward) and count == micro_batches - 1
        key = kind, kind_of[chunk], count == 0, is_last, kind != "F" and is_last and is_whole
        action = types.get(key) or types.setdefault(key, ActionType(*key))
        state = (key, *flight, *pending, messages.number)
        moment = None
        if state not in seen:
            seen.add(state)
            moment = Moment(action, tuple(flight), tuple(pending), passed_items, messages.number, messages.shared)
        if action.first or action.last:
            passed[action] = passed.get(action, 0) + 1
            passed_items = tuple(sorted(passed.items()))
            seen.clear()
        return moment

    for index, action in enumerate(build_actions(layout, stage, micro_batches)):
        kind, at = action.kind, kind_of[action.chunk]
        if kind != "W":
            if moment := start("F" if kind == "F" else "B", action.chunk, is_whole=kind == "B"):
                yield moment
            flight[at] += 1 if kind == "F" else -1
            if kind != "F" and has_split_backward:
                pending[at] += 1
            messages.finish(action, is_pending=has_split_backward)
            messages.exchange_after(index)
        if kind == "W" or (kind == "B" and has_split_backward):
            # A whole backward frees its gathered weights itself.
            if moment := start("W", action.chunk, is_whole=kind == "W"):
                yield moment
            pending[at] -= 1
            messages.finish_weights(action)
        if kind == "W":
            messages.exchange_after(index)


class _Messages:
    """Hidden states and gradients between stages, as `workers.trainer.parallel.pipeline_parallel` holds them.

    A message is allocated when it is requested. A chunk's input stays until its backward ends. A gradient for another
    chunk of the rank stays until the backward of that chunk, and a gradient for another rank until its request. Chunks
    count the outputs in flight. Chunks with pending weight gradients count their input and both gradients: those
    messages are in `_shared_states` and `_shared_gradients`.
    """

    def __init__(self, schedule: StageSchedule, micro_batches: int) -> None:
        self._stage, self._last = schedule.stage, schedule.pp * schedule.virtual_stages - 1
        layout = schedule.layout
        self._owner = get_chunk_stages(layout) if schedule.pp > 1 else {0: 0}
        self._micro_batches = micro_batches
        self._requests: Iterator[tuple[int, int]] = iter(())
        if schedule.pp > 1:
            requests = order_requests(layout, micro_batches)[schedule.stage]
            self._requests = zip(requests.slots, requests.codes, strict=True)
        self._next = next(self._requests, None)
        self._counted = 0
        self._shared_states, self._shared_gradients = set[tuple[int, int]](), set[tuple[int, int]]()
        self.exchange_after(-1)

    @property
    def number(self) -> int:
        """Messages that no chunk counts."""
        return self._counted - len(self._shared_states) - len(self._shared_gradients)

    @property
    def shared(self) -> tuple[int, int]:
        """Hidden states and gradients that chunks count too."""
        return len(self._shared_states), len(self._shared_gradients)

    def exchange_after(self, index: int) -> None:
        """Request the messages that follow an action. The index -1 is the start of the step."""
        while self._next is not None and self._next[0] == index + 1:
            chunk, micro_batch = divmod(self._next[1] // 2, self._micro_batches)
            if self._owner[chunk] == self._stage:
                self._counted += 1
            elif self._next[1] % 2:  # a gradient for another rank
                self._counted -= 1
                self._shared_gradients.discard((chunk, micro_batch))
            self._next = next(self._requests, None)

    def finish(self, action: Action, *, is_pending: bool) -> None:
        """Update the messages after a forward or backward."""
        if action.kind == "F":
            return
        _, i, chunk = action
        is_own = chunk > 0 and self._owner[chunk - 1] == self._stage
        self._counted -= chunk < self._last  # the gradient of its output
        # The gradient of its input stays: next to the input for a chunk of this rank, otherwise in its place.
        self._counted += is_own
        self._shared_states.discard((chunk + 1, i))
        if is_pending and chunk:
            self._shared_gradients.add((chunk - 1, i))
        if is_pending and is_own:
            self._shared_states.add((chunk, i))

    def finish_weights(self, action: Action) -> None:
        """Update the messages after a backward of weights."""
        _, i, chunk = action
        self._shared_states.discard((chunk, i))
        self._shared_gradients.difference_update(((chunk - 1, i), (chunk, i)))
