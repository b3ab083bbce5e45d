"""Choose the constants of unknown software from published step times, and predict each source without its own rows.

A constant is a cause with a unit: the efficiency of matmuls, attention, links, and memory-bound kernels, and the time
that the host needs per kernel. Each starts at a prior value. The fit minimizes the mean absolute logarithm of predicted
over measured time, and a penalty for the distance from the prior. Each source has the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.columns import RowSpec
from planner.cost.timing import Timer
from planner.hardware.stacks import STACKS, Stack

Vector = NDArray[np.float64]

# Prior value and its uncertainty as a standard deviation of the logarithm.
PRIORS: dict[str, tuple[float, float]] = {
    "gemm": (1.0, 0.2),
    "gemm_hopper": (1.0, 0.15),
    "gemm_blackwell": (1.0, 0.2),
    "gemm_fp8": (0.95, 0.15),
    "attention": (1.0, 0.3),
    "attention_hopper": (1.0, 0.2),
    "elementwise": (1.6, 0.3),
    "loss": (1.3, 0.4),
    "scores": (2.0, 0.4),
    "compiled": (0.7, 0.25),
    "launch_s": (8e-5, 0.1),  # measured: of Meshboard's trainer, on hosts of H100 and H200
    "step_s": (1e-2, 0.7),
    "link_efficiency": (0.8, 0.3),
    "exposed_tp": (0.7, 0.3),
    "contention": (0.2, 0.5),
}
NAMES = tuple(PRIORS)
_START = np.log([value for value, _ in PRIORS.values()])
_DEVIATION = np.array([deviation for _, deviation in PRIORS.values()])
PENALTY = 0.1  # of a deviation from the prior, relative to one source
REPEATS = 40  # of the weighted least squares
MAX_CHANGE = 0.5  # of the logarithm of a constant
DIFFERENCE = 0.05  # of the logarithm of a constant, for its derivative
SMALL_ERROR = 0.05  # errors below are weighted like squares


class MeasuredRow(NamedTuple):
    """A spec with its measured seconds per step, its source, and whether the constants are fitted on it."""

    source: str
    planned: RowSpec
    measured_s: float
    is_fitted: bool


class Estimate(NamedTuple):
    """Predicted seconds, and the share of the step that waits for the host."""

    seconds: float
    host_share: float


def build_stack(constants: Vector) -> Stack:
    """Return the unknown stack with these logarithms of constants."""
    values = dict(zip(NAMES, (float(value) for value in np.exp(constants)), strict=True))
    known = STACKS["unknown"]
    exposed, faster = min(1.0, values.pop("exposed_tp")), values.pop("attention_hopper")
    compiled = values.pop("compiled") * values["elementwise"]
    hopper = known.attention_hopper
    changes = {
        **values,
        "norms": values["elementwise"],
        "compiled": {"norms": compiled, "elementwise": compiled},
        "overlap": {**known.overlap, "tp": 1 - exposed},
        "attention_hopper": hopper._replace(peak_factor=PEAK_FACTOR_HOPPER * faster),
    }
    return known._replace(**changes)


PEAK_FACTOR_HOPPER = 1.565  # torch's attention on an H100 (planner.hardware.kernel_time)


def estimate_rows(rows: Sequence[MeasuredRow], stack: Stack) -> list[Estimate]:
    """Return the estimates of rows with one set of constants."""
    timers: dict[str, Timer] = {}
    found = []
    for row in rows:
        key = row.planned.cluster.model_dump_json()
        if key not in timers:
            timers[key] = Timer(row.planned.cluster, {"unknown": stack})
        timing = timers[key].get_step(row.planned.spec)
        found.append(Estimate(timing.step_s * row.planned.scale, timing.host_share))
    return found


class Fit:
    """The constants that follow from all rows, or from those of some sources.

    The errors of rows are treated as linear around the priors. A fit without a source then does not depend on that
    source, and takes no time.
    """

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        self.rows = [row for row in rows if row.is_fitted]
        self.sources = np.array([row.source for row in self.rows])
        self._errors = self._get_errors(_START)
        columns = [
            (self._get_errors(_START + DIFFERENCE * axis) - self._errors) / DIFFERENCE for axis in np.eye(len(NAMES))
        ]
        self._slopes = np.array(columns).T
        self.constants = self._solve(np.ones(len(self.rows), dtype=bool))

    def leave_out(self, left_out: set[str]) -> Stack:
        """Return the constants that follow from the rows of all other sources."""
        return build_stack(self._solve(~np.isin(self.sources, list(left_out))))

    def _get_errors(self, constants: Vector) -> Vector:
        found = estimate_rows(self.rows, build_stack(constants))
        return np.array([math.log(one.seconds / row.measured_s) for one, row in zip(found, self.rows, strict=True)])

    def _solve(self, used: NDArray[np.bool_]) -> Vector:
        """Return the constants of the least sum of absolute errors, by iteratively reweighted least squares."""
        counts = {source: int(np.sum(self.sources[used] == source)) for source in set(self.sources[used])}
        weights = np.array([1 / counts[source] for source in self.sources[used]])
        errors, slopes = self._errors[used], self._slopes[used]
        change = np.zeros(len(NAMES))
        for _ in range(REPEATS):
            size = np.maximum(np.abs(errors + slopes @ change), SMALL_ERROR)
            weighted = slopes.T * (weights / size)
            change = np.linalg.solve(weighted @ slopes + np.diag(PENALTY / _DEVIATION**2), -weighted @ errors)
        found: Vector = _START + np.clip(change, -MAX_CHANGE, MAX_CHANGE)
        return found
