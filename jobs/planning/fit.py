"""Compare the predicted memory of a job with the memory of the device that it would run on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jobs.planning.hosts import AvailableHost
from planner.facts.kinds import KINDS
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError

ALLOW_UNFIT = "allow_unfit"  # next to the fields of a spec in the body of a submit
MIN_DEVICE_BYTES = 2**20  # Hosts that report less do not know their memory.
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

# "tight" fits, except at the upper bound of the estimate. "uncertain" fits only at its lower bound.
State = Literal["fits", "tight", "uncertain", "unfit", "unchecked"]


class UnfitError(SpecError):
    """Even the lower bound of the memory estimate exceeds the memory of the device."""


class Fit(NamedTuple):
    """The memory of the fullest rank and of its device."""

    state: State
    peak_bytes: int  # point estimate of the fullest rank
    least_bytes: int  # lower bound of the estimate
    device_bytes: int  # per rank
    device: str

    @property
    def summary(self) -> str:
        """Return the fit as one sentence, or an empty text without an estimate."""
        arithmetic = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.device_bytes)} per rank."
        return {
            "fits": "Fits.",
            "tight": f"Might not fit, because the margin of error exceeds the free memory: {arithmetic}",
            "uncertain": f"Probably does not fit: {arithmetic}",
            "unfit": f"Does not fit: {arithmetic}",
            "unchecked": "",
        }[self.state]


UNCHECKED = Fit("unchecked", 0, 0, 0, "")


def compute_fit(spec: JobSpec, estimate: Mapping[str, Any] | None, hosts: Sequence[AvailableHost]) -> Fit:
    """Compute whether a job fits the device that its estimate is for."""
    kind, resources = KINDS[spec.kind], spec.resources
    if not estimate or kind.shares_one_slot or not kind.trains:
        return UNCHECKED
    cluster, peak, share = estimate["cluster"], estimate["peak_memory_bytes"], estimate["memory_interval"]["share"]
    if cluster["memory_bytes"] < MIN_DEVICE_BYTES:
        return UNCHECKED
    least = peak / (1 + share) if share > 1 else peak * (1 - share)
    device_bytes, most = cluster["memory_bytes"], cluster["memory_bytes"]
    if resources.device == "cpu":
        if not any(host.device == "cpu" for host in hosts):
            return UNCHECKED
        # Slots of a CPU host share its memory, so ranks may use the shares of empty slots.
        ranks_per_host = math.ceil(estimate["world_size"] / cluster["nodes"])
        most = device_bytes * cluster["per_node"] // min(ranks_per_host, cluster["per_node"])
    state: State = "uncertain"
    if estimate["fits"]:
        state = "tight" if estimate.get("tight") else "fits"
    elif least > most and resources.engine == "hosts":  # The devices of another engine are unknown.
        state = "unfit"
    return Fit(state, peak, round(least), most if state == "unfit" else device_bytes, cluster["accelerator"])


def require_fit(spec: JobSpec, estimate: Mapping[str, Any] | None, hosts: Sequence[AvailableHost]) -> None:
    """Refuse a job that does not fit even at the lower bound of its memory estimate.

    Raises:
        UnfitError: The job does not fit.
    """
    fit = compute_fit(spec, estimate, hosts)
    if fit.state != "unfit":
        return
    needs = (
        f"`layout` needs {format_bytes(fit.peak_bytes)} of memory per rank (at least {format_bytes(fit.least_bytes)})"
    )
    has = f"but {fit.device} has {format_bytes(fit.device_bytes)}"
    do = f"Use more ranks, a higher ZeRO stage, or recompute. To submit the job anyway, set `{ALLOW_UNFIT}` to true."
    raise UnfitError([Problem("layout", f"{needs}, {has}. {do}")])


def split_allow_unfit(data: Any) -> tuple[Any, bool]:
    """Split `allow_unfit` from the spec that it was sent with.

    Raises:
        SpecError: The value is not a boolean.
    """
    if not isinstance(data, Mapping) or ALLOW_UNFIT not in data:
        return data, False
    value = data[ALLOW_UNFIT]
    if not isinstance(value, bool):
        raise SpecError([Problem(ALLOW_UNFIT, f"`{ALLOW_UNFIT}` is {value!r:.60}. Use true or false.")])
    return {name: each for name, each in data.items() if name != ALLOW_UNFIT}, value


def format_bytes(number: float) -> str:
    """Return bytes with three digits and a unit: 1536 is "1.50 KiB"."""
    power = 0
    while number >= 1023.5 and power < len(UNITS) - 1:
        number /= 1024
        power += 1
    digits = 0 if power == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {UNITS[power]}"
