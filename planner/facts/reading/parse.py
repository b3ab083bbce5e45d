"""Untrusted JSON into a spec that can run, or every reason why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.facts.fields import JOB_ID, WORD
from planner.facts.kinds import KINDS
from planner.facts.layout import problems
from planner.facts.models.presets import PRESETS, expand_preset
from planner.facts.reading.known import known_words
from planner.facts.resources import SLURM_FEATURES, SLURM_NAME, SLURM_NAMES, SLURM_NODES, SLURM_TIME
from planner.facts.spec import JobSpec, Problem, SpecError

PATTERN_WORDS = {
    JOB_ID: "must be the id of a job: a-z, 0-9 and -, at most 16 of them",
    WORD: "must be of letters, digits and . _ = -, with a letter or digit first",
    SLURM_NAME: "must be a name of at most 64 of A-Z a-z 0-9 _ . -",
    SLURM_NAMES: "must be names of at most 64 of A-Z a-z 0-9 _ . - each, with commas between",
    SLURM_TIME: "must be [days-]hours:minutes:seconds, as 12:00:00 or 2-00:00:00",
    SLURM_FEATURES: "must be features of nodes with & or | between, as a100&nvlink",
    SLURM_NODES: "must be nodes as Slurm writes them, as node[3-5],node9",
}
STAND_IN = "gpt-tiny"  # a spec names a model, also where the kind of job needs none


def parse_spec(data: object, *, slots: int | None = None) -> JobSpec:
    """Turn untrusted JSON into a spec that can run.

    A model may be given as `{"preset": "gpt-tiny"}`; single sizes beside the preset override it.
    `slots`: how many slots the largest host has, when known.

    Raises:
        SpecError: with every problem found, each naming its field and showing the arithmetic.
    """
    spec = parse_fields(data)
    found = problems(spec, slots=slots)
    if found:
        raise SpecError(found)
    return spec


def parse_fields(data: object) -> JobSpec:
    """Like `parse_spec`, but only what each field says by itself; rules across fields are not checked.

    Raises:
        SpecError: with every field that is wrong.
    """
    if not isinstance(data, Mapping):
        raise SpecError([Problem("spec", f"must be an object, got {_shown(data)}")])
    expanded: dict[str, Any] = {str(key): value for key, value in data.items()}
    if any(name == expanded.get("kind") and not kind.trains for name, kind in KINDS.items()):
        expanded.setdefault("model", {"preset": STAND_IN})
    model = expanded.get("model")
    found: list[Problem] = []
    if isinstance(model, Mapping):
        name = model.get("preset")
        if isinstance(name, str) and name not in PRESETS:
            known = ", ".join(PRESETS)
            found.append(Problem("model.preset", f"there is no preset {_shown(name)}; there are {known}"))
            # Any known sizes will do for the rest to be checked as well.
            model = {**model, "preset": next(iter(PRESETS))}
        expanded["model"] = expand_preset(model)
    try:
        spec = JobSpec.model_validate(expanded)
    except ValidationError as error:
        found += [problem_of(e, JobSpec) for e in error.errors(include_url=False)]
    if found:
        raise SpecError(found)
    return spec


_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "is not a known field",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode text",
    "string_pattern_mismatch": "must not hold NUL or other control characters",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} of them",
    "too_long": "must have at most {max_length} of them",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}
VALIDATORS_OWN = ("value_error", "assertion_error")


def problem_of(error: Any, model: type[BaseModel]) -> Problem:
    """pydantic's error of a model in our words, with the value that was given."""
    field = ".".join(str(part) for part in error["loc"]) or "spec"
    context = error.get("ctx", {})
    text = _words(error, context)
    if error["type"] == "missing":
        return Problem(field, text)
    known = known_words(model, error["loc"]) if error["type"] == "extra_forbidden" else ""
    text += f", got {_shown(error['input'])}" + (f"; {known}" if known else "")
    return Problem(_shown(field, quote=False), text)


def _words(error: Any, context: Mapping[str, Any]) -> str:
    if error["type"] in VALIDATORS_OWN:  # in the words that it raised
        return str(context["error"])
    ours = PATTERN_WORDS.get(context.get("pattern", "")) or _MESSAGES.get(error["type"])
    return ours.format(**context) if ours else str(error["msg"])  # which may quote what was sent, braces and all


def _shown(value: object, *, quote: bool = True) -> str:
    """A value as JSON would write it, short and safe to print whatever it holds."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write the longest ones out
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, str | float) else str(value)
    if isinstance(value, str) and not quote:
        text = text[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."
