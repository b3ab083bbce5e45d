"""Compare the measured traffic of a rank with the prediction of `planner.cost.traffic`.

There is one row for each phase, operation, and axis that is predicted or measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from contracts.telemetry.items import Cell, Label, Op, Phase
from contracts.telemetry.results import VerdictRow
from planner.cost.traffic import (
    GroupTraffic,
    compute_routed_bytes,
    count_evals,
    get_eval_traffic,
    get_setup_traffic,
    get_step_traffic,
)
from planner.facts.layout import get_coordinates
from planner.facts.spec import JobSpec

Key = tuple[Phase, Op, Label]
BESIDE: frozenset[Phase] = frozenset(("checkpoint", "proof"))
Counted = dict[Key, tuple[int, int]]  # calls and payload bytes


def compare_run_traffic(
    spec: JobSpec, rank: int, cells: list[Cell], received: Mapping[Phase, int], done: int = 0
) -> list[VerdictRow]:
    """Return the traffic rows of a run after `steps_done` steps.

    `received` has the rows that routers sent to this rank's experts. Checkpoints and verification are excluded, because
    their messages have no predictable size.
    """
    expected: Counted = {}
    _add_collectives(expected, "setup", 1, get_setup_traffic(spec, rank))
    _add_phase(expected, spec, rank, "step", spec.train.steps - done, received)
    _add_phase(expected, spec, rank, "eval", count_evals(spec, done), received)
    return _make_rows(expected, [cell for cell in cells if cell["phase"] not in BESIDE])


def compare_step_traffic(
    spec: JobSpec, rank: int, cells: list[Cell], received: Mapping[Phase, int]
) -> list[VerdictRow]:
    """Return the traffic rows of one step."""
    expected: Counted = {}
    _add_phase(expected, spec, rank, "step", 1, received)
    return _make_rows(expected, cells)


def _add_collectives(expected: Counted, phase: Phase, times: int, collectives: Iterable[GroupTraffic]) -> None:
    """Add the predicted collectives of a phase that runs `times` times."""
    for c in collectives if times else []:
        count, payload = expected.get((phase, c.op, c.axis), (0, 0))
        expected[phase, c.op, c.axis] = count + times * c.count, payload + times * c.payload_bytes


def _add_phase(
    expected: Counted, spec: JobSpec, rank: int, phase: Phase, times: int, received: Mapping[Phase, int]
) -> None:
    """Add the prediction of a phase, including the rows that routers sent to this rank's experts."""
    step = phase == "step"
    _add_collectives(expected, phase, times, get_step_traffic(spec, rank) if step else get_eval_traffic(spec, rank))
    key: Key = (phase, "all_to_all", "ep")
    if not times or key not in expected:
        return
    count, payload = expected[key]
    stage, micro_batches = get_coordinates(rank, spec.layout).pp, times * spec.train.micro_batches
    expected[key] = count, payload + compute_routed_bytes(spec, stage, received[phase], micro_batches, backward=step)


def _make_rows(expected: Counted, cells: list[Cell]) -> list[VerdictRow]:
    """Return one row per key, sorted."""
    measured: Counted = {}
    for cell in cells:
        key = cell["phase"], cell["op"], cell["axis"]
        count, payload = measured.get(key, (0, 0))
        measured[key] = count + cell["count"], payload + cell["payload_bytes"]
    rows = []
    for key in sorted({*expected, *measured}):
        (want_count, want_bytes), (got_count, got_bytes) = expected.get(key, (0, 0)), measured.get(key, (0, 0))
        rows.append(
            VerdictRow(
                phase=key[0],
                op=key[1],
                axis=key[2],
                predicted_count=want_count,
                measured_count=got_count,
                predicted_bytes=want_bytes,
                measured_bytes=got_bytes,
            )
        )
    return rows
