"""What the hardware that is planned for makes of a spec's memory."""

from __future__ import annotations

from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import STACKS


def on(cluster: Cluster, spec: JobSpec) -> JobSpec:
    """The spec with the device that is planned for, whichever it names: what a norm keeps goes by that."""
    if spec.resources.device == cluster.device:
        return spec
    resources = spec.resources.model_copy(update={"device": cluster.device})
    return spec.model_copy(update={"resources": resources})


def allowance(spec: JobSpec, cluster: Cluster, tensor_bytes: int) -> int:
    """Bytes: of the device and its allocator, and where no profile holds what the software was measured with, what the
    stack's communicators and buckets take."""
    own = cluster.accelerator.compute_overhead_bytes(tensor_bytes)
    stacked = cluster.device == "cuda" and cluster.profile is None
    return own + (STACKS[spec.resources.stack].beside_bytes if stacked else 0)
