"""The bytes that a rank needs, by part.

`autograd` models the memory of forward and backward on a `tape`. `layer` follows the model as the trainer computes it,
and `pieces` records each piece. `zero` adds the buffers of FSDP2, and `chunk` combines them into an action of the
schedule. `moments` finds the moments of a schedule at which a rank can hold most, and `taped` adds everything up.
Megatron allocates differently: see `megatron`. `options` estimates methods that the trainer does not have.
"""

from functools import lru_cache

from planner.cost.memory.megatron import MegatronMemory
from planner.cost.memory.options import OptionsMemory
from planner.cost.memory.rank import Peak, StageMemory
from planner.cost.memory.tape import PARTS
from planner.cost.memory.taped import TapedMemory
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.facts.spec import JobSpec

__all__ = ["PARTS", "Peak", "StageMemory"]


def is_taped(spec: JobSpec | ResolvedPlan) -> bool:
    """Return whether the memory of the spec's stack comes from the tape, as for every stack but Megatron."""
    return spec.resources.stack != "megatron"


@lru_cache(maxsize=16)  # plans in use
def _get_stage_memory(plan: ResolvedPlan) -> StageMemory:
    if plan.spec.memory is not None:
        return OptionsMemory(plan)
    return TapedMemory(plan) if is_taped(plan) else MegatronMemory(plan)


def get_stage_memory(spec: JobSpec | ResolvedPlan) -> StageMemory:
    """Return the memory of each pipeline stage."""
    return _get_stage_memory(resolve(spec))


def get_memory(spec: JobSpec | ResolvedPlan, stage: int) -> dict[str, int]:
    """Return the bytes by part of a rank of the stage, at the highest moment of a step."""
    return dict(zip(PARTS, find_peak(spec, stage).levels, strict=True))


def find_peak(spec: JobSpec | ResolvedPlan, stage: int) -> Peak:
    """Return the highest moment of a step on a rank of the stage."""
    return get_stage_memory(spec).find_peak(stage)


def get_max_bytes(spec: JobSpec | ResolvedPlan, stages: tuple[int, ...], limit: int | None = None) -> int:
    """Return the peak of the fullest of `stages`. A peak above `limit` may be returned too low."""
    return get_stage_memory(spec).get_max_bytes(stages, limit)


def get_min_bytes(spec: JobSpec | ResolvedPlan, stage: int) -> int:
    """Return the bytes that any micro-batch size needs: model state and the gradients of an update."""
    return get_stage_memory(spec).get_min_bytes(stage)


def get_gradient_bytes(spec: JobSpec | ResolvedPlan, stage: int) -> int:
    """Return the bytes of the complete gradients of a step on a rank of the stage."""
    return get_stage_memory(spec).get_gradient_bytes(stage)


def get_host_bytes(spec: JobSpec | ResolvedPlan, stage: int) -> int:
    """Return the bytes that memory options move to the CPU memory of a rank of the stage."""
    memory = get_stage_memory(spec)
    return memory.get_host_bytes(stage) if isinstance(memory, OptionsMemory) else 0


def get_layer_bytes(spec: JobSpec | ResolvedPlan, *, moe: bool = False) -> int:
    """Return the bytes that one layer keeps from a micro-batch's forward to its backward."""
    return get_stage_memory(spec).get_layer_bytes(moe=moe)


def count_held_parameters(spec: JobSpec | ResolvedPlan, stage: int) -> int:
    """Return the parameter elements that a rank of the stage keeps and updates."""
    return get_stage_memory(spec).count_held(stage)


def count_computed_parameters(spec: JobSpec | ResolvedPlan, stage: int) -> int:
    """Return the parameter elements that a rank of the stage keeps for compute."""
    return get_stage_memory(spec).count_computed(stage)
