"""Stages that hold as much of the model as each other, and so cost the same."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from planner.facts.layout import V_SCHEDULES, is_v_turn
from planner.facts.resources import StackName
from planner.facts.spec import Balance, JobSpec, Layout, ModelSpec
from planner.facts.stages import get_stage_chunks


def unlike_stages(spec: JobSpec) -> dict[int, int]:
    """{a stage: how many hold as much of the model as it does}"""
    return {stages[0]: len(stages) for stages in alike_stages(spec)}


def alike_stages(spec: JobSpec) -> tuple[tuple[int, ...], ...]:
    """All stages, those together that hold as much of the model."""
    layout, stack = spec.layout, spec.resources.stack
    is_v = layout.schedule in V_SCHEDULES
    return _alike_stages(spec.model, layout.pp, layout.virtual_stages, is_v, layout.balance, stack)


@cache
def _alike_stages(
    model: ModelSpec, pp: int, virtual_stages: int, is_v: bool, balance: Balance, stack: StackName
) -> tuple[tuple[int, ...], ...]:
    layout = Layout(pp=pp, virtual_stages=virtual_stages, schedule="zbv" if is_v else "1f1b", balance=balance)
    dense = model.moe.dense_layers if model.moe else 0
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in range(pp):
        stage = get_stage_chunks(model, layout, index, stack)
        chunks = tuple((len(chunk), sum(i >= dense for i in chunk)) for chunk in stage.chunks)
        kinds[chunks, stage.first, stage.last, is_v_turn(layout, index)].append(index)
    return tuple(map(tuple, kinds.values()))
