"""What is predicted of a job, as its row keeps it."""

from __future__ import annotations

from typing import Any

from planner.cost.estimate import Estimate, estimate
from planner.facts.kinds import KINDS
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster


def foretold(spec: JobSpec, cluster: Cluster) -> Estimate | dict[str, Any]:
    """Empty where nothing is: of what a script, a lab or a calibration does, the model and the steps that a spec always
    names say nothing."""
    return estimate(spec, cluster) if KINDS[spec.kind].trains else {}
