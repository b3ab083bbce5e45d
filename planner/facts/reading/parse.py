"""Untrusted JSON into a spec that can run, or every reason why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.facts.fields import JOB_ID, WORD
from planner.facts.kinds import KINDS
from planner.facts.layout import problems
from planner.facts.models.presets import PRESETS, expand_preset
from planner.facts.reading.known import known_words
from planner.facts.resources import SLURM_FEATURES, SLURM_NAME, SLURM_NAMES, SLURM_NODES, SLURM_TIME
from planner.facts.spec import JobSpec, Problem, SpecError
from planner.facts.words import alternatives

PATTERN_WORDS = {
    JOB_ID: "Use a job id of at most 16 characters from a-z, 0-9, and -",
    WORD: "Use letters, digits, and . _ = -, with a letter or digit first",
    SLURM_NAME: "Use a name of at most 64 characters from A-Z a-z 0-9 _ . -",
    SLURM_NAMES: "Use comma-separated names of at most 64 characters from A-Z a-z 0-9 _ . -",
    SLURM_TIME: "Use [days-]hours:minutes:seconds, such as 12:00:00 or 2-00:00:00",
    SLURM_FEATURES: "Use node features with & or | between, such as a100&nvlink",
    SLURM_NODES: "Use Slurm node names, such as node[3-5],node9",
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
        raise SpecError([Problem("spec", f"`spec` is {_shown(data)}. Use an object.")])
    expanded: dict[str, Any] = {str(key): value for key, value in data.items()}
    if any(name == expanded.get("kind") and not kind.trains for name, kind in KINDS.items()):
        expanded.setdefault("model", {"preset": STAND_IN})
    model = expanded.get("model")
    found: list[Problem] = []
    if isinstance(model, Mapping):
        name = model.get("preset")
        if isinstance(name, str) and name not in PRESETS:
            like = get_close_matches(name[:100], PRESETS, n=5, cutoff=0.4) or list(PRESETS)[:5]
            text = f"`model.preset` is {_shown(name)}, which is unknown. Use a preset such as {alternatives(like)}."
            found.append(Problem("model.preset", text))
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
    "int_type": "Use a whole number",
    "int_from_float": "Use a whole number",
    "float_type": "Use a number",
    "finite_number": "Use a finite number",
    "bool_type": "Use true or false",
    "string_type": "Use text",
    "string_unicode": "Use valid Unicode text",
    "string_pattern_mismatch": "Remove NUL and other control characters",
    "model_type": "Use an object",
    "dict_type": "Use an object",
    "list_type": "Use a list",
    "tuple_type": "Use a list",
    "too_short": "Use a list of {min_length} or more entries",
    "too_long": "Use a list of at most {max_length} entries",
    "greater_than": "Use more than {gt}",
    "greater_than_equal": "Use at least {ge}",
    "less_than": "Use less than {lt}",
    "less_than_equal": "Use at most {le}",
    "string_too_short": "Use 1 character or more",
    "string_too_long": "Use at most {max_length} characters",
    "literal_error": "Use {expected}",
    "enum": "Use {expected}",
}
VALIDATORS_OWN = ("value_error", "assertion_error")


def problem_of(error: Any, model: type[BaseModel], field: str = "") -> Problem:
    """Return pydantic's error as a problem with the received value and the valid values."""
    field = field or _shown(".".join(str(part) for part in error["loc"]) or "spec", quote=False)
    if error["type"] == "missing":
        return Problem(field, f"`{field}` is missing. Add it.")
    if error["type"] == "extra_forbidden":
        known = known_words(model, error["loc"])
        return Problem(field, f"`{field}` is not a known field. Remove it.{f' {known}' if known else ''}")
    text = _words(error, error.get("ctx", {})).rstrip(".")
    joint = ", which " if text[:1].islower() else ". "  # validators raise "is not a mail address"
    return Problem(field, f"`{field}` is {_shown(error['input'])}{joint}{text}.")


def _words(error: Any, context: Mapping[str, Any]) -> str:
    if error["type"] in VALIDATORS_OWN:
        return str(context["error"])
    ours = PATTERN_WORDS.get(context.get("pattern", "")) or _MESSAGES.get(error["type"])
    numbers = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    return ours.format(**numbers) if ours else str(error["msg"])  # pydantic's text may quote the input with its braces


def _shown(value: object, *, quote: bool = True) -> str:
    """A value as JSON would write it, short and safe to print whatever it holds."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write the longest ones out
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, str | float) else str(value)
    if isinstance(value, str) and not quote:
        text = text[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."
