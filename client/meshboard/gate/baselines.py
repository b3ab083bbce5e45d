"""What `--baseline` names: runs that have a mean, the newest first, and those of a branch that have none with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshboard import answers
from meshboard.errors import WrongError
from meshboard.gate.measures import Run, run_of, run_of_facts
from meshboard.gate.specs import check_same


class Baseline(NamedTuple):
    """`spec`: what its runs ran, None where that is not told. `left_aside`: runs as a board tells them, `why` in words
    for people."""

    name: str
    runs: list[Run]
    spec: answers.StoredSpec | None
    left_aside: Sequence[answers.LeftAside] = ()
    why: Sequence[str] = ()


def of_job(name: str, told: answers.JobDetail) -> Baseline:
    """Raises UnknownError: it has not ended well."""
    return Baseline(name, [run_of(told)], told.get("spec"))


def of_branch(name: str, told: answers.Baseline) -> Baseline:
    """An older board tells neither what its runs ran nor which are left aside."""
    runs = [run_of_facts(run["name"], run["facts"]) for run in told["runs"]]
    return Baseline(name, runs, told.get("spec"), told.get("left_aside", ()), why_aside(name, told))


def why_aside(name: str, told: answers.Baseline) -> list[str]:
    """Which runs of a branch are in no mean, a line for each reason."""
    aside, jobs = told.get("left_aside", ()), dict[str, list[str]]()
    for run in aside:
        jobs.setdefault(run["why"], []).append(run["job"])
    total = len(told["runs"]) + len(aside)
    return [
        f"Baseline {name} excludes {len(ids)} of {total} runs: {why} ({', '.join(ids)})" for why, ids in jobs.items()
    ]


def check_alike(found: Sequence[Baseline]) -> None:
    """Raises WrongError: several, and not all are known to be of one spec."""
    if len(found) < 2:
        return
    for one in found:
        if one.spec is None:
            raise WrongError(
                f"Baseline {one.name} has no stored spec, so the gate cannot combine it with other baselines."
                " Use one baseline."
            )
    check_same([{"id": one.name, "spec": one.spec} for one in found], "baselines")
