"""Rank the constants of a stack by how much of the error they explain when a row's software changes them.

Only the fit half is used, because the report half must not influence which facts a spec can have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.published.predict import PageEstimate, RowPrediction, build_page_spec, build_software, replace_software
from planner.cost.timing import Timer
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.stack_options import Stacks
from planner.hardware.stacks import STACKS, Stack

MIN_EFFECT = 5e-4  # of the mean error of a stack's rows: what closes less is not printed


class ConstantEffect(NamedTuple):
    """Rows that change a constant, and the change of the mean error with it alone and without it alone."""

    name: str
    rows: int
    alone: float
    without: float


def print_gap(answers: Sequence[RowPrediction]) -> None:
    """Print effects by stack, from a spec that names only the stack and from one with all facts."""
    for told in (False, True):
        title = "error from settings that a spec lacks" if told else "error from settings that a stack lacks"
        print(f"\n{title}, fit half")
        print(f"{'constant that rows change':<40} {'rows':>5} {'closes':>8} {'opens':>8}")
        for stack in STACKS:
            part = [a for a in answers if a.planned.stack == stack and a.row.is_fit_half and _has_page_estimate(a)]
            for one in _rank_constants(part, told=told):
                print(f"{f'{stack}, {one.name}':<40} {one.rows:>5} {one.alone:>+8.2%} {one.without:>+8.2%}")


def _has_page_estimate(answer: RowPrediction) -> bool:
    return answer.row.kind == "time" and isinstance(answer.said, PageEstimate)


def _rank_constants(answers: Sequence[RowPrediction], *, told: bool) -> list[ConstantEffect]:
    timed = _ErrorTimer()
    alone: dict[str, list[float]] = defaultdict(list)
    without: dict[str, list[float]] = defaultdict(list)
    for a in answers:
        output, known = _get_base_setting(a, told=told), a.planned.kernels
        off = timed.off(a, output.spec, output.stack)
        for name in Stack._fields:
            theirs, ours = getattr(known, name), getattr(output.stack, name)
            if theirs == ours:
                continue
            alone[name].append(off - timed.off(a, output.spec, output.stack._replace(**{name: theirs})))
            less = timed.off(a, a.planned.spec, known._replace(**{name: ours}))
            without[name].append(less - timed.off(a, a.planned.spec, known))
    found = [
        ConstantEffect(name, len(gains), sum(gains) / len(answers), sum(without[name]) / len(answers))
        for name, gains in alone.items()
    ]
    stored = [one for one in found if max(one.alone, one.without) >= MIN_EFFECT]
    return sorted(stored, key=lambda one: -max(one.alone, one.without))


class _BaseSetting(NamedTuple):
    """Spec without software, and the constants that it is planned with."""

    spec: JobSpec
    stack: Stack


def _get_base_setting(answer: RowPrediction, *, told: bool) -> _BaseSetting:
    spec = build_page_spec(answer.row, answer.planned)
    software = build_software(answer.row, answer.planned) if told else None
    stack = Stacks(STACKS, answer.planned.cluster.per_node).get_stack(replace_software(spec, software))
    return _BaseSetting(spec, stack)


class _ErrorTimer:
    """Compute errors of steps, with one timer per cluster and stack."""

    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}

    def off(self, answer: RowPrediction, spec: JobSpec, stack: Stack) -> float:
        """Return the error of the row's step with these constants."""
        name, cluster = answer.planned.stack, answer.planned.cluster
        seconds = self._timer(cluster, name, stack).get_step(replace_software(spec, None)).step_s
        return abs(seconds * answer.planned.scale / answer.measured - 1)

    def _timer(self, cluster: Cluster, name: StackName, stack: Stack) -> Timer:
        key = cluster.model_dump_json(), repr(stack)
        if key not in self._timers:
            self._timers[key] = Timer(cluster, {name: stack})
        return self._timers[key]
