"""Whether runs are of one spec: only then does their spread say anything of noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshboard.errors import WrongError

MEASURED = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")
# A seed is of the noise that several runs tell; where and as which job it ran, and what it was planned for, changes
# no figure that is meant. What a rank gets of a Slurm node does. The board holds a branch's runs to the same rule.
MAY_DIFFER = {
    *("model.preset", "train.seed"),
    *(f"resources.{name}" for name in ("host", "pool", "labels", "max_hosts", "stack", "software")),
    *(f"resources.slurm.{name}" for name in ("partition", "account", "qos", "time_limit", "constraint", "exclude")),
}
MOST_NAMED = 4


def check_same(runs: Sequence[Mapping[str, Any]], what: str = "jobs") -> None:
    """Raises WrongError: runs, each with its `id` and `spec`, are of different specs; names the first fields."""
    first = runs[0]
    for run in runs[1:]:
        apart = _apart(_measured(first), _measured(run), "")
        fields = [f"{field}: {ours!r} and {theirs!r}" for field, ours, theirs in apart]
        if fields:
            more = f" and {len(fields) - MOST_NAMED} more" if len(fields) > MOST_NAMED else ""
            words = (
                f"{what.capitalize()} {first['id']} and {run['id']} have different specs, so they cannot be averaged"
            )
            raise WrongError(f"{words}: {', '.join(fields[:MOST_NAMED])}{more}")


def _measured(run: Mapping[str, Any]) -> dict[str, Any]:
    spec = run.get("spec") or {}
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
