"""Which constants of a stack, as rows' software changes them, close how much of what a spec leaves open.

Of the fit half alone: what a spec may say is chosen by this, and the report half must not steer it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.published.predict import Answer
from benchmarks.published.said import Said, software_of, spec_of, with_software
from planner.cost.timing import Timer
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.stack_options import Stacks
from planner.hardware.stacks import STACKS, Stack

LEAST = 5e-4  # of the mean error of a stack's rows: what closes less is not printed


class Constant(NamedTuple):
    """Of a stack: rows that change it, by how much the mean error of all its rows falls with it alone, and grows
    without it beside all else that is known."""

    name: str
    rows: int
    alone: float
    without: float


def print_gap(answers: Sequence[Answer]) -> None:
    """By stack, from a spec that names it alone and from one that says what it can."""
    for told in (False, True):
        title = "error from settings that a spec lacks" if told else "error from settings that a stack lacks"
        print(f"\n{title}, fit half")
        print(f"{'constant that rows change':<40} {'rows':>5} {'closes':>8} {'opens':>8}")
        for stack in STACKS:
            part = [a for a in answers if a.planned.stack == stack and a.row.is_fit_half and _is_timed(a)]
            for one in _ranked(part, told=told):
                print(f"{f'{stack}, {one.name}':<40} {one.rows:>5} {one.alone:>+8.2%} {one.without:>+8.2%}")


def _is_timed(answer: Answer) -> bool:
    return answer.row.kind == "time" and isinstance(answer.said, Said)


def _ranked(answers: Sequence[Answer], *, told: bool) -> list[Constant]:
    timed = _Timed()
    alone: dict[str, list[float]] = defaultdict(list)
    without: dict[str, list[float]] = defaultdict(list)
    for a in answers:
        said, known = _base(a, told=told), a.planned.kernels
        off = timed.off(a, said.spec, said.stack)
        for name in Stack._fields:
            theirs, ours = getattr(known, name), getattr(said.stack, name)
            if theirs == ours:
                continue
            alone[name].append(off - timed.off(a, said.spec, said.stack._replace(**{name: theirs})))
            less = timed.off(a, a.planned.spec, known._replace(**{name: ours}))
            without[name].append(less - timed.off(a, a.planned.spec, known))
    found = [
        Constant(name, len(gains), sum(gains) / len(answers), sum(without[name]) / len(answers))
        for name, gains in alone.items()
    ]
    kept = [one for one in found if max(one.alone, one.without) >= LEAST]
    return sorted(kept, key=lambda one: -max(one.alone, one.without))


class _Base(NamedTuple):
    """Where a row starts from: a spec without software, and the constants that it is planned with."""

    spec: JobSpec
    stack: Stack


def _base(answer: Answer, *, told: bool) -> _Base:
    spec = spec_of(answer.row, answer.planned)
    software = software_of(answer.row, answer.planned) if told else None
    stack = Stacks(STACKS, answer.planned.cluster.per_node).get_stack(with_software(spec, software))
    return _Base(spec, stack)


class _Timed:
    """Keeps one timer for each cluster and stack."""

    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}

    def off(self, answer: Answer, spec: JobSpec, stack: Stack) -> float:
        """How far off the row's step is with these constants."""
        name, cluster = answer.planned.stack, answer.planned.cluster
        seconds = self._timer(cluster, name, stack).get_step(with_software(spec, None)).step_s
        return abs(seconds * answer.planned.scale / answer.measured - 1)

    def _timer(self, cluster: Cluster, name: StackName, stack: Stack) -> Timer:
        key = cluster.model_dump_json(), repr(stack)
        if key not in self._timers:
            self._timers[key] = Timer(cluster, {name: stack})
        return self._timers[key]
