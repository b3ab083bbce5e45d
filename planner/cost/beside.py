"""The memory that a device needs in addition to tensors."""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import STACKS


def on(cluster: Cluster, spec: JobSpec) -> JobSpec:
    """Return the spec with the device of the cluster, which decides what norms keep."""
    if spec.resources.device == cluster.device:
        return spec
    resources = spec.resources.model_copy(update={"device": cluster.device})
    return spec.model_copy(update={"resources": resources})


def allowance(spec: JobSpec | ResolvedPlan, cluster: Cluster, tensor_bytes: int) -> int:
    """Return the bytes of the device and its allocator, and of the stack's communicators and buckets.

    A profile already includes the communicators and buckets.
    """
    own = cluster.accelerator.compute_overhead_bytes(tensor_bytes)
    adds_stack = cluster.device == "cuda" and cluster.profile is None
    return own + (STACKS[spec.resources.stack].beside_bytes if adds_stack else 0)
