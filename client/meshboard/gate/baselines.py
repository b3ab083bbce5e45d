"""Baselines of the gate, and the rule that compared runs have one spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshboard import answers
from meshboard.errors import WrongError
from meshboard.gate.measures import MeasuredRun, parse_facts, parse_job

COMPARED_FIELDS = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")
# These fields change no measurement. The seed is part of the noise. The board has an equal list.
IGNORED_FIELDS = {
    *("model.preset", "train.seed"),
    *(f"resources.{name}" for name in ("host", "pool", "labels", "max_hosts", "stack", "software")),
    *(f"resources.slurm.{name}" for name in ("partition", "account", "qos", "time_limit", "constraint", "exclude")),
}
MAX_NAMED_FIELDS = 4


class Baseline(NamedTuple):
    """Runs of a baseline, newest first.

    Args:
        spec: Spec of the runs, or None if the board does not return it.
        excluded: Runs of the branch that are not part of the baseline, as the board returns them.
        reasons: A sentence per reason for excluded runs.
    """

    name: str
    runs: list[MeasuredRun]
    spec: answers.StoredSpec | None
    excluded: Sequence[answers.ExcludedRun] = ()
    reasons: Sequence[str] = ()


def baseline_from_job(name: str, job: answers.JobDetail) -> Baseline:
    """Return a baseline of one job. Raises MissingValueError if the job has not succeeded."""
    return Baseline(name, [parse_job(job)], job.get("spec"))


def baseline_from_branch(name: str, content: answers.Baseline) -> Baseline:
    """Return the baseline of a branch. An older board returns neither the spec nor excluded runs."""
    runs = [parse_facts(run["name"], run["facts"]) for run in content["runs"]]
    excluded = content.get("left_aside", ())
    return Baseline(name, runs, content.get("spec"), excluded, explain_excluded(name, content))


def explain_excluded(name: str, content: answers.Baseline) -> list[str]:
    """Return a sentence per reason for which runs of a branch are not part of the baseline."""
    excluded, jobs = content.get("left_aside", ()), dict[str, list[str]]()
    for run in excluded:
        jobs.setdefault(run["why"], []).append(run["job"])
    total = len(content["runs"]) + len(excluded)
    return [
        f"Baseline {name} excludes {len(ids)} of {total} runs: {reason} ({', '.join(ids)})"
        for reason, ids in jobs.items()
    ]


def check_same_baselines(baselines: Sequence[Baseline]) -> None:
    """Raise WrongError if the baselines do not have one known spec."""
    if len(baselines) < 2:
        return
    for one in baselines:
        if one.spec is None:
            raise WrongError(
                f"Baseline {one.name} has no stored spec, so the gate cannot combine it with other baselines."
                " Use one baseline."
            )
    check_same_spec([{"id": one.name, "spec": one.spec} for one in baselines], "baselines")


def check_same_spec(runs: Sequence[Mapping[str, Any]], what: str = "jobs") -> None:
    """Check that runs, each with `id` and `spec`, have one spec. Else their spread is not noise.

    Raises:
        WrongError: Specs differ. Names the first fields.
    """
    first = runs[0]
    for run in runs[1:]:
        fields = [
            f"{field}: {ours!r} and {theirs!r}"
            for field, ours, theirs in _find_differences(_select_fields(first), _select_fields(run), "")
        ]
        if fields:
            more = f" and {len(fields) - MAX_NAMED_FIELDS} more" if len(fields) > MAX_NAMED_FIELDS else ""
            words = (
                f"{what.capitalize()} {first['id']} and {run['id']} have different specs, so they cannot be averaged"
            )
            raise WrongError(f"{words}: {', '.join(fields[:MAX_NAMED_FIELDS])}{more}")


def _select_fields(run: Mapping[str, Any]) -> dict[str, Any]:
    spec = run.get("spec") or {}
    return {name: spec[name] for name in COMPARED_FIELDS if name in spec}


def _find_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield different fields of two specs. A spec of an older version lacks newer fields, which are skipped."""
    for name in ours:
        field = path + name
        if name not in theirs or field in IGNORED_FIELDS or ours[name] == theirs[name]:
            continue
        if isinstance(ours[name], dict) and isinstance(theirs[name], dict):
            yield from _find_differences(ours[name], theirs[name], f"{field}.")
        else:
            yield field, ours[name], theirs[name]
