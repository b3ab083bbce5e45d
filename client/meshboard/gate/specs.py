"""Whether runs are of one spec: only then does their spread say anything of noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshboard.errors import WrongError

MEASURED = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")
# A seed is of the noise that several runs tell; where and as which job it ran changes no figure that is meant.
MAY_DIFFER = {
    "train.seed",
    *(f"resources.{name}" for name in ("host", "pool", "labels", "max_hosts", "slurm", "stack")),
}
MOST_NAMED = 4


def check_same(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Raises WrongError: jobs, as `GET /jobs/ID` tells them, are of different specs; names the first fields."""
    first = jobs[0]
    for job in jobs[1:]:
        apart = _apart(_measured(first), _measured(job), "")
        fields = [f"{field}: {ours!r} and {theirs!r}" for field, ours, theirs in apart]
        if fields:
            more = f" and {len(fields) - MOST_NAMED} more" if len(fields) > MOST_NAMED else ""
            words = f"jobs {first['id']} and {job['id']} are of different specs, and no mean of them means anything"
            raise WrongError(f"{words}: {', '.join(fields[:MOST_NAMED])}{more}")


def _measured(job: Mapping[str, Any]) -> dict[str, Any]:
    spec = job.get("spec") or {}
    return {name: spec[name] for name in MEASURED if name in spec}


def _apart(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Fields that both have: one that a spec lacks was not there yet when it was written."""
    for name in ours:
        field = path + name
        if name not in theirs or field in MAY_DIFFER or ours[name] == theirs[name]:
            continue
        if isinstance(ours[name], dict) and isinstance(theirs[name], dict):
            yield from _apart(ours[name], theirs[name], f"{field}.")
        else:
            yield field, ours[name], theirs[name]
