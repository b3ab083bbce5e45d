"""What a device's memory holds beside tensors."""

from __future__ import annotations

from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import STACKS


def allowance(spec: JobSpec, cluster: Cluster, tensor_bytes: int) -> int:
    """Bytes: of the device and its allocator, and where no profile holds what the software was measured with, what the
    stack's communicators and buckets take."""
    own = cluster.accelerator.allowance(tensor_bytes)
    stacked = cluster.device == "cuda" and cluster.profile is None
    return own + (STACKS[spec.resources.stack].beside_bytes if stacked else 0)
