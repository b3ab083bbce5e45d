"""Whether runs ran alike: only then has what they measured a mean. The client holds jobs to the same rule
(`meshboard.gate.baselines`); a test holds the two together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jobs.runs.history.queries.compare import differences
from planner.facts.resources import SoftwareSpec
from planner.facts.spec import JobSpec

MEASURED = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")
# A seed is of the noise that several runs tell; where and as which job it ran, and what it was planned for, changes
# no figure that is meant. What a rank gets of a Slurm node does.
MAY_DIFFER = {
    *("model.preset", "train.seed"),
    *(f"resources.{name}" for name in ("host", "pool", "labels", "max_hosts", "stack")),
    *(f"resources.software.{name}" for name in SoftwareSpec.model_fields),
    *(f"resources.slurm.{name}" for name in ("partition", "account", "qos", "time_limit", "constraint", "exclude")),
}
MOST_NAMED = 4
LONGEST_VALUE = 60


def measured_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's figures hang on, of its job's spec."""
    return {name: spec[name] for name in MEASURED if name in spec}


def why_unlike(ran: Mapping[str, Any] | None, newest: Mapping[str, Any] | None) -> str:
    """Why a run and the newest have no mean; empty where they have one. None: what it ran was not kept."""
    if ran is None or newest is None:
        return f"the spec of {'this job' if ran is None else 'the newest job'} is not stored"
    apart = [one for one in differences([_whole(ran), _whole(newest)]) if one["field"] not in MAY_DIFFER]
    named = [f"{one['field']} {', not '.join(map(_words, one['values']))}" for one in apart[:MOST_NAMED]]
    return ", ".join(named) + (f" and {len(apart) - MOST_NAMED} more" if len(apart) > MOST_NAMED else "")


def _whole(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the defaults of fields that came after it was written, which is what it ran with."""
    try:
        return measured_of(JobSpec.model_validate(spec).model_dump(mode="json"))
    except ValidationError:  # of an older version
        return spec


def _words(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
