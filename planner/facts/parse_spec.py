"""Untrusted JSON into a spec that can run, or every reason why not.

Which fields there are where somebody named one that there is not.

Parts of a spec as the JSON that an answer has of them: dicts, described as the models that read them are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from planner.facts.kinds import KINDS
from planner.facts.presets import PRESETS, expand_preset
from planner.facts.resources import SLURM_FEATURES, SLURM_NAME, SLURM_NAMES, SLURM_NODES, SLURM_TIME
from planner.facts.spec import JobSpec, Layout, ModelSpec
from planner.facts.spec_rules import problems
from planner.facts.validation import JOB_ID, WORD, Problem, SpecError, alternatives

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


MANY = 12  # of more fields those alone are named that look like the one that was given, if any do


def known_words(model: type[BaseModel], place: Sequence[object]) -> str:
    """What may stand at a place of a model instead of its last part, in words; empty where that cannot be told."""
    *outer, given = place
    found: type[BaseModel] | None = model
    for part in outer:
        if isinstance(part, int) or found is None:
            continue
        field = found.model_fields.get(str(part))
        found = next(_models(field.annotation), None) if field else None
    if found is None or not found.model_fields:
        return ""
    names = list(found.model_fields)
    like = get_close_matches(str(given)[:100], names) if len(names) > MANY else []
    *others, last = like or names
    return f"{'Similar fields' if like else 'Fields'}: {', '.join([*others, last])}."


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those within a type: of a union, a list, what may be absent."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


class ReadBy(NamedTuple):
    """Marks a dict that `model` reads, or a TypedDict has the fields of."""

    model: type

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.model)


SpecDict = Annotated[dict[str, Any], ReadBy(JobSpec)]
LayoutDict = Annotated[dict[str, Any], ReadBy(Layout)]
ModelDict = Annotated[dict[str, Any], ReadBy(ModelSpec)]
