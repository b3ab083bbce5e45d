"""Bytes one rank needs, by part: an allocation tape along its list of actions.

`graph` is autograd as far as memory goes, `layer` and `ends` are the model as the trainer computes it, `pieces` walks
each by itself, `zero` is what FSDP2 does around them, `chunk` puts an action together, `moments` finds those of a
schedule at which a rank can hold most, and `stage` adds them up.
"""

from planner.cost.memory.pieces import layer_bytes
from planner.cost.memory.stage import fullest, held_parameters, least_bytes, model_state, most_bytes
from planner.cost.memory.tape import PARTS
from planner.facts.spec import JobSpec

__all__ = ["PARTS", "fullest", "held_parameters", "layer_bytes", "least_bytes", "memory", "model_state", "most_bytes"]


def memory(spec: JobSpec, stage: int) -> dict[str, int]:
    """Bytes by part on a rank of pipeline stage `stage`, at the moment of a step when it holds most."""
    return dict(zip(PARTS, fullest(spec, stage).levels, strict=True))
