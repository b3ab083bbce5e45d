"""How fast the link of a group may be: a host's calibration, its runs, or its accelerator's data sheet."""

from __future__ import annotations

from pydantic import ValidationError
from typing_extensions import TypedDict

from jobs.models import Job
from planner.hardware.cluster import Basis, Cluster


class Links(TypedDict):
    """Bytes/s that a rank sends at most, to ranks of its node and to others; `per_node` ranks share one as planned.

    `link_runs`: runs whose calls told `node_bytes_per_s`; 0 where it is of `basis`.
    """

    name: str
    basis: Basis
    per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    link_runs: int


def links(job: Job) -> Links | None:
    """Of the hardware that the job was planned for; None of a job that was planned for none."""
    if not job.hardware:
        return None
    try:
        cluster = Cluster.model_validate(job.hardware, strict=False)
    except ValidationError:  # as an earlier version stored it
        return None
    return {
        "name": cluster.name,
        "basis": cluster.basis,
        "per_node": cluster.per_node,
        "node_bytes_per_s": cluster.node.bytes_per_s,
        "network_bytes_per_s": cluster.network.bytes_per_s,
        "link_runs": cluster.num_rate_runs,
    }
