"""Provide the hardware of a job to the panels of its steps."""

from __future__ import annotations

from django import template
from pydantic import ValidationError
from typing_extensions import TypedDict

from jobs.models import Job
from planner.hardware.cluster import Basis, Cluster

register = template.Library()


class LinkRates(TypedDict):
    """Hold the bytes per second that a rank can send in its node and to other nodes. `per_node` ranks share one node.

    Args:
        link_runs: The number of runs that measured `node_bytes_per_s`, 0 if the rate comes from `basis`.
    """

    name: str
    basis: Basis
    per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    link_runs: int


@register.filter
def link_speeds(job: Job) -> LinkRates | None:
    """Return the link rates of the hardware for which a job was planned, or None."""
    if not job.hardware:
        return None
    try:
        cluster = Cluster.model_validate(job.hardware, strict=False)
    except ValidationError:  # stored by an earlier version
        return None
    return {
        "name": cluster.name,
        "basis": cluster.basis,
        "per_node": cluster.per_node,
        "node_bytes_per_s": cluster.node.bytes_per_s,
        "network_bytes_per_s": cluster.network.bytes_per_s,
        "link_runs": cluster.num_rate_runs,
    }
