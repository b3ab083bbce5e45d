"""Parse untrusted JSON into a spec that can run, or report every problem."""

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
from planner.facts.spec_rules import find_problems
from planner.facts.validation import JOB_ID_PATTERN, WORD_PATTERN, Problem, SpecError, format_alternatives

PATTERN_MESSAGES = {
    JOB_ID_PATTERN: "Use a job id of at most 16 characters from a-z, 0-9, and -",
    WORD_PATTERN: "Use letters, digits, and . _ = -, with a letter or digit first",
    SLURM_NAME: "Use a name of at most 64 characters from A-Z a-z 0-9 _ . -",
    SLURM_NAMES: "Use comma-separated names of at most 64 characters from A-Z a-z 0-9 _ . -",
    SLURM_TIME: "Use [days-]hours:minutes:seconds, such as 12:00:00 or 2-00:00:00",
    SLURM_FEATURES: "Use node features with & or | between, such as a100&nvlink",
    SLURM_NODES: "Use Slurm node names, such as node[3-5],node9",
}
DEFAULT_PRESET = "gpt-tiny"  # A spec has a model even if its kind does not use one.


def parse_spec(data: object, *, slots: int | None = None) -> JobSpec:
    """Parse untrusted JSON into a spec that can run.

    A model can be `{"preset": "gpt-tiny"}`. Additional sizes override those of the preset.

    Args:
        slots: Slots of the largest host, if known.

    Raises:
        SpecError: With every problem.
    """
    spec = parse_fields(data)
    found = find_problems(spec, slots=slots)
    if found:
        raise SpecError(found)
    return spec


def parse_fields(data: object) -> JobSpec:
    """Parse untrusted JSON, and check single fields but no rules across fields.

    Raises:
        SpecError: With every invalid field.
    """
    if not isinstance(data, Mapping):
        raise SpecError([Problem("spec", f"`spec` is {_format_input(data)}. Use an object.")])
    expanded: dict[str, Any] = {str(key): value for key, value in data.items()}
    if any(name == expanded.get("kind") and not kind.trains for name, kind in KINDS.items()):
        expanded.setdefault("model", {"preset": DEFAULT_PRESET})
    found: list[Problem] = []
    if isinstance(expanded.get("model"), Mapping):
        expanded["model"] = _expand_model("model", expanded["model"], found)
    script = expanded.get("script")
    plan = script.get("plan") if isinstance(script, Mapping) else None
    if isinstance(script, Mapping) and isinstance(plan, Mapping) and isinstance(plan.get("model"), Mapping):
        model = _expand_model("script.plan.model", plan["model"], found)
        expanded["script"] = {**script, "plan": {**plan, "model": model}}
    try:
        spec = JobSpec.model_validate(expanded)
    except ValidationError as error:
        found += [convert_error(e, JobSpec) for e in error.errors(include_url=False)]
    if found:
        raise SpecError(found)
    return spec


def _expand_model(field: str, model: Mapping[str, Any], found: list[Problem]) -> dict[str, Any]:
    """Return a model with the sizes of its preset. Add a problem if the preset is unknown."""
    name = model.get("preset")
    if isinstance(name, str) and name not in PRESETS:
        like = get_close_matches(name[:100], PRESETS, n=5, cutoff=0.4) or list(PRESETS)[:5]
        use = f"Use a preset such as {format_alternatives(like)}."
        found.append(Problem(f"{field}.preset", f"`{field}.preset` is {_format_input(name)}, which is unknown. {use}"))
        # Any known sizes allow checks of the other fields.
        model = {**model, "preset": next(iter(PRESETS))}
    return expand_preset(model)


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
VALIDATOR_ERRORS = ("value_error", "assertion_error")


def convert_error(error: Any, model: type[BaseModel], field: str = "") -> Problem:
    """Convert a pydantic error to a problem with the input and the valid values."""
    field = field or _format_input(".".join(str(part) for part in error["loc"]) or "spec", quote=False)
    if error["type"] == "missing":
        return Problem(field, f"`{field}` is missing. Add it.")
    if error["type"] == "extra_forbidden":
        known = format_known_fields(model, error["loc"])
        return Problem(field, f"`{field}` is not a known field. Remove it.{f' {known}' if known else ''}")
    text = _format_error(error, error.get("ctx", {})).rstrip(".")
    joint = ", which " if text[:1].islower() else ". "  # Validators raise texts such as "is not a mail address".
    return Problem(field, f"`{field}` is {_format_input(error['input'])}{joint}{text}.")


def _format_error(error: Any, context: Mapping[str, Any]) -> str:
    if error["type"] in VALIDATOR_ERRORS:
        return str(context["error"])
    ours = PATTERN_MESSAGES.get(context.get("pattern", "")) or _MESSAGES.get(error["type"])
    numbers = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    return ours.format(**numbers) if ours else str(error["msg"])  # pydantic's text can contain braces of the input.


def _format_input(value: object, *, quote: bool = True) -> str:
    """Format a value as short JSON that is safe to print."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python does not format very long integers.
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, str | float) else str(value)
    if isinstance(value, str) and not quote:
        text = text[1:-1]
    return text if len(text) <= 60 else text[:57] + "..."


MAX_LISTED_FIELDS = 12  # Above this number, an error lists only similar fields.


def format_known_fields(model: type[BaseModel], place: Sequence[object]) -> str:
    """Return the valid fields next to an unknown field, or an empty text.

    Args:
        place: Path of the unknown field in the model.
    """
    *outer, field_name = place
    found: type[BaseModel] | None = model
    for part in outer:
        if isinstance(part, int) or found is None:
            continue
        field = found.model_fields.get(str(part))
        found = next(_find_models(field.annotation), None) if field else None
    if found is None or not found.model_fields:
        return ""
    names = list(found.model_fields)
    like = get_close_matches(str(field_name)[:100], names) if len(names) > MAX_LISTED_FIELDS else []
    *others, last = like or names
    return f"{'Similar fields' if like else 'Fields'}: {', '.join([*others, last])}."


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models inside a type annotation, such as a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _find_models(inner)


class SchemaFrom(NamedTuple):
    """Annotation of a dict that has the JSON schema of a model."""

    model: type

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.model)


SpecDict = Annotated[dict[str, Any], SchemaFrom(JobSpec)]
LayoutDict = Annotated[dict[str, Any], SchemaFrom(Layout)]
ModelDict = Annotated[dict[str, Any], SchemaFrom(ModelSpec)]
