"""The moments of a rank's list of actions at which it can hold most, whatever the sizes.

What a rank holds when an action begins is a sum: chunks in flight, chunks whose weight gradients wait, what the first
and the last backward of a chunk leave behind, messages. So a schedule is walked once, and a moment that another one
exceeds in every respect is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from operator import ge
from typing import NamedTuple

from planner.facts.layout import get_chunk_indices
from planner.facts.pipeline_messages import Message, get_chunk_stages, order_exchanges
from planner.facts.schedules import Action, build_actions, splits_backward
from planner.facts.spec import Layout, Schedule
from planner.facts.validation import format_count


class Species(NamedTuple):
    """An action as far as memory goes: F, B (I as well) or W of one of the rank's kinds of chunk.

    `frees`: after it the chunk's gathered weights are not needed in this step.
    """

    kind: str
    chunk: int
    first: bool
    last: bool
    frees: bool = False


class Moment(NamedTuple):
    """When an action of `species` begins. By kind of chunk: forwards whose backward is not done (`flight`), backwards
    whose weights are not (`waiting`); `passed`: how often each first or last has been; `messages` besides. `twice`:
    hidden states and gradients among messages that chunks count too, which `messages` is without."""

    species: Species
    flight: tuple[int, ...]
    waiting: tuple[int, ...]
    passed: tuple[tuple[Species, int], ...]
    messages: int
    twice: tuple[int, int]

    @property
    def words(self) -> str:
        name = {"F": "a forward", "B": "a backward", "W": "a backward of weights"}[self.species.kind]
        which = "the step's first" if self.species.first else "the step's last" if self.species.last else "a later one"
        waiting = f", {sum(self.waiting)} whose weight gradients are not computed yet" if any(self.waiting) else ""
        return f"in {name} ({which}) with {format_count(sum(self.flight), 'chunk')} in flight{waiting}"


class Pipe(NamedTuple):
    """A schedule on one rank; `kinds` by chunk of the rank. `left`: the last forward of a chunk is unlike others."""

    schedule: Schedule
    pp: int
    virtual_stages: int
    stage: int
    kinds: tuple[int, ...]
    left: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(pp=self.pp, schedule=self.schedule, virtual_stages=self.virtual_stages)


def moments(pipe: Pipe, micro_batches: int) -> tuple[Moment, ...]:
    """Those that none exceeds, and the end of the step's last action is none of them."""
    return _moments(pipe, steady(pipe, micro_batches))


@cache
def _moments(pipe: Pipe, micro_batches: int) -> tuple[Moment, ...]:
    return _highest(_walk(pipe, micro_batches))


def moments_of(pipe: Pipe, stages: tuple[int, ...], micro_batches: int) -> tuple[Moment, ...]:
    """Of all `stages`, which hold alike, together: one of them is at its fullest when the fullest stage is."""
    return _moments_of(pipe, stages, steady(pipe, micro_batches))


@cache
def _moments_of(pipe: Pipe, stages: tuple[int, ...], micro_batches: int) -> tuple[Moment, ...]:
    return _highest(m for stage in stages for m in _moments(pipe._replace(stage=stage), micro_batches))


@cache
def flights_of(pipe: Pipe, stages: tuple[int, ...], micro_batches: int) -> frozenset[tuple[int, ...]]:
    """Chunks in flight at those moments."""
    return frozenset(moment.flight for moment in moments_of(pipe, stages, micro_batches))


def _highest(several: Iterable[Moment]) -> tuple[Moment, ...]:
    found: dict[tuple[Species, tuple[tuple[Species, int], ...]], dict[tuple[int, ...], Moment]] = {}
    for moment in dict.fromkeys(several):
        others = found.setdefault((moment.species, moment.passed), {})
        held = (moment.messages, *moment.flight, *moment.waiting)
        if held in others or any(all(map(ge, other, held)) for other in others):
            continue
        for other in [other for other in others if all(map(ge, held, other))]:
            del others[other]
        others[held] = moment
    return tuple(moment for group in found.values() for moment in group.values())


def steady(pipe: Pipe, micro_batches: int) -> int:
    """So many show all that happens: then a schedule repeats itself, but for those that run all forwards first; a test
    walks further."""
    pp, chunks = pipe.pp, pipe.virtual_stages
    if pipe.schedule in ("gpipe", "looped_bfs"):
        return micro_batches
    if pipe.schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and chunks > 1:
        return min(micro_batches, (3 if pipe.schedule == "interleaved_1f1b" else 4) * pp)
    return min(micro_batches, (2 * pp if chunks > 1 else pp) + 3)


def _walk(pipe: Pipe, m: int) -> Iterator[Moment]:
    layout, stage = pipe.layout, pipe.stage
    own = get_chunk_indices(layout, stage) if layout.pp > 1 else (0,)
    kind_of = dict(zip(own, pipe.kinds, strict=True))
    number = max(pipe.kinds) + 1
    flight, waiting, passed = [0] * number, [0] * number, dict[Species, int]()
    done: dict[tuple[str, int], int] = {}
    messages = _Messages(pipe, m)
    later = splits_backward(layout)

    def species(kind: str, chunk: int, *, whole: bool = True) -> Species:
        count = done.get((kind, chunk), 0)
        done[kind, chunk] = count + 1
        backward = kind != "F"
        last = (backward or pipe.left) and count == m - 1
        return Species(kind, kind_of[chunk], count == 0, last, frees=backward and last and whole)

    told: tuple[tuple[Species, int], ...] = ()

    def moment(what: Species) -> Moment:
        return Moment(what, tuple(flight), tuple(waiting), told, messages.number, messages.twice)

    def pass_by(what: Species) -> None:
        nonlocal told
        if what.first or what.last:
            passed[what] = passed.get(what, 0) + 1
            told = tuple(sorted(passed.items()))

    for index, action in enumerate(build_actions(layout, stage, m)):
        kind, at = action.kind, kind_of[action.chunk]
        if kind != "W":
            what = species("F" if kind == "F" else "B", action.chunk, whole=kind == "B")
            yield moment(what)
            pass_by(what)
            flight[at] += 1 if kind == "F" else -1
            if kind != "F" and later:
                waiting[at] += 1
            messages.after(action, waits=later)
            messages.asked_after(index)
        if kind == "W" or (kind == "B" and later):
            what = species("W", action.chunk, whole=kind == "W")  # what a whole backward used it freed itself
            yield moment(what)
            pass_by(what)
            waiting[at] -= 1
            messages.after_weights(action)
        if kind == "W":
            messages.asked_after(index)


class _Messages:
    """Hidden states and their gradients between stages, as `workers.trainer.parallel.pipeline_parallel` keeps them.

    A message is there from when it is asked for. What a chunk was given stays until its backward has ended, a gradient
    for another chunk of the rank until that one's, for another rank until it is asked for. An output in flight counts
    with its chunk, and what waits for its weights with its input and both gradients: `_twice` are those that are
    counted elsewhere too.
    """

    def __init__(self, pipe: Pipe, m: int) -> None:
        self._stage, self._last = pipe.stage, pipe.pp * pipe.virtual_stages - 1
        self._owner = get_chunk_stages(pipe.layout) if pipe.pp > 1 else {0: 0}
        self._slots = order_exchanges(pipe.layout, m)[pipe.stage] if pipe.pp > 1 else ()
        self._counted, self._twice = 0, set[Message]()
        self.asked_after(-1)

    @property
    def number(self) -> int:
        return self._counted - len(self._twice)

    @property
    def twice(self) -> tuple[int, int]:
        """Hidden states and gradients."""
        states = sum(message.kind == "F" for message in self._twice)
        return states, len(self._twice) - states

    def asked_after(self, index: int) -> None:
        """What is asked for after the action of this index, -1 for before the first."""
        for message, _, receiver in self._slots[index + 1] if self._slots else ():
            if receiver == self._stage:
                self._counted += 1
            elif message.kind == "B":
                self._counted -= 1
                self._twice.discard(message)

    def after(self, action: Action, *, waits: bool) -> None:
        if action.kind == "F":
            return
        _, i, chunk = action
        own = chunk > 0 and self._owner[chunk - 1] == self._stage
        self._counted -= chunk < self._last  # its output's gradient
        # Its input's gradient stays: for a chunk of this rank beside the input, else in place of it.
        self._counted += own
        self._twice.discard(Message("F", chunk + 1, i))
        if waits and chunk:
            self._twice.add(Message("B", chunk - 1, i))
        if waits and own:
            self._twice.add(Message("F", chunk, i))

    def after_weights(self, action: Action) -> None:
        _, i, chunk = action
        self._twice -= {Message("F", chunk, i), Message("B", chunk - 1, i), Message("B", chunk, i)}
