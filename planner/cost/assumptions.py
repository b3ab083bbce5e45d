"""Say which unknown property of the software changes a step time the most."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import TypedDict

from planner.cost.timing import Timer
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import STACKS, Stack

MAX_ASSUMPTIONS = 3
MIN_CHANGE = 0.03  # of the step time; smaller changes are not listed
# Bytes of memory-bound kernels relative to one kernel per operation: with fused kernels, and in eager code
# (`norms` of the stacks in planner.hardware.stacks).
FUSED_BYTES, EAGER_BYTES = 1.0, 2.2


class Assumption(TypedDict):
    """An assumption about unknown software, and the step time without it as a ratio to the predicted time."""

    words: str
    ratio: float


def list_assumptions(spec: JobSpec, cluster: Cluster) -> list[Assumption]:
    """Return the assumptions that change the step time the most, or none if the software is known or measured."""
    if spec.resources.stack != "unknown" or cluster.device == "cpu" or cluster.measured_steps:
        return []
    predicted = Timer(cluster).predict(spec).step_s
    found = [
        Assumption(words=words, ratio=Timer(cluster, {"unknown": stack}).predict(changed).step_s / predicted)
        for words, changed, stack in _list_changes(spec, STACKS["unknown"])
    ]
    large = [one for one in found if abs(one["ratio"] - 1) >= MIN_CHANGE]
    return sorted(large, key=lambda one: -max(one["ratio"], 1 / one["ratio"]))[:MAX_ASSUMPTIONS]


def _list_changes(spec: JobSpec, stack: Stack) -> Iterator[tuple[str, JobSpec, Stack]]:
    """Yield (condition in words, spec, constants) of each assumption that does not hold."""
    train = spec.train
    if train.attention == "fused":
        unfused = train.model_copy(update={"attention": "unfused"})
        yield "without FlashAttention", spec.model_copy(update={"train": unfused}), stack
    if not train.compile:
        compiled = train.model_copy(update={"compile": True})
        yield "with torch.compile", spec.model_copy(update={"train": compiled}), stack
        fused = stack._replace(norms=FUSED_BYTES, elementwise=FUSED_BYTES)
        yield "with fused norms and activations", spec, fused
        eager = stack._replace(norms=EAGER_BYTES, elementwise=EAGER_BYTES)
        yield "with a kernel per operation", spec, eager
    if spec.layout.world_size > 1:
        slow = stack._replace(link_efficiency=stack.link_efficiency / 2)
        yield "if collectives reach half the bandwidth", spec, slow
    if spec.layout.tp > 1 and spec.layout.sequence_parallel:
        yield "if tp communication does not overlap", spec, stack._replace(overlap={})
    yield "if the host launches kernels half as fast", spec, stack._replace(launch_s=2 * stack.launch_s)
