"""Bytes one rank needs, by part: an allocation tape along its list of actions.

`graph` is autograd as far as memory goes, `layer` and `ends` are the model as the trainer computes it, `pieces` walks
each by itself, `zero` is what FSDP2 does around them, `chunk` puts an action together, `moments` finds those of a
schedule at which a rank can hold most, and `stage` adds them up. Megatron allocates in its own way: `megatron`.
"""

from planner.cost.memory import megatron, pieces
from planner.cost.memory import stage as tape_of
from planner.cost.memory.stage import Fullest, computed_parameters, held_parameters, model_state
from planner.cost.memory.tape import PARTS
from planner.facts.spec import JobSpec

__all__ = [
    "PARTS",
    "computed_parameters",
    "fullest",
    "gradient_bytes",
    "held_parameters",
    "is_taped",
    "layer_bytes",
    "least_bytes",
    "memory",
    "model_state",
    "most_bytes",
]


def is_taped(spec: JobSpec) -> bool:
    """Whether memory is told by the tape, which is that of every stack but Megatron's."""
    return spec.resources.stack != "megatron"


def memory(spec: JobSpec, stage: int) -> dict[str, int]:
    """Bytes by part on a rank of pipeline stage `stage`, at the moment of a step when it holds most."""
    return dict(zip(PARTS, fullest(spec, stage).levels, strict=True))


def fullest(spec: JobSpec, stage: int) -> Fullest:
    """Levels by part at the highest moment of a step on a rank of the stage, and which moment that is."""
    return tape_of.fullest(spec, stage) if is_taped(spec) else megatron.fullest(spec, stage)


def most_bytes(spec: JobSpec, stages: tuple[int, ...], limit: int | None = None) -> int:
    """The sum of `fullest` on the fullest of `stages`, which hold alike; or what is surely beyond the `limit`."""
    return tape_of.most_bytes(spec, stages, limit) if is_taped(spec) else megatron.most_bytes(spec, stages)


def least_bytes(spec: JobSpec, stage: int) -> int:
    """What no choice of micro-batches or recompute can go below: state, and the gradients that an update needs."""
    return tape_of.least_bytes(spec, stage) if is_taped(spec) else megatron.least_bytes(spec, stage)


def gradient_bytes(spec: JobSpec, stage: int) -> int:
    """Of a step's gradients on a rank of the stage, once complete."""
    return tape_of.gradient_bytes(spec, stage) if is_taped(spec) else megatron.gradient_bytes(spec, stage)


def layer_bytes(spec: JobSpec, *, moe: bool = False) -> int:
    """What one layer keeps from a micro-batch's forward to its backward, on one rank."""
    return pieces.layer_bytes(spec, moe=moe) if is_taped(spec) else megatron.layer_bytes(spec, moe=moe)
