"""HTML forms derived from the pydantic models of a spec.

The model gives the type, limits and default of a field. `planner.facts.parse_spec` alone checks its meaning. Names
are dotted, as in a `Problem`: "train.steps".
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from django.utils.datastructures import MultiValueDict
from pydantic import BaseModel

from jobs.core.text import parse_json
from planner.facts.validation import Problem, SpecError

KINDS_BY_TYPE = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}
YES = ("true", "on")
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_LIST_INDEX = re.compile(r"\.[0-9]+$")

Fields = Mapping[str, "Field"]
Options = dict[str, list[tuple[str, str]]]


class Field(NamedTuple):
    """A field of a form. Hidden fields have the kind json."""

    kind: Literal["int", "float", "bool", "text", "json"]
    optional: bool  # An empty field means null.
    many: bool  # A list: numbers with commas, words as in a shell, or ticked choices.
    default: Any
    choices: tuple[str, ...]  # empty for any value
    limits: str  # for example "1 to 65,536"

    @property
    def is_checkbox(self) -> bool:
        """Return whether the field is a check box, for which a browser sends nothing if it is not ticked."""
        return (self.many and bool(self.choices)) or (self.kind == "bool" and self.default is not True)

    def read(self, texts: list[str]) -> Any:
        """Return the value of the field. Text of another type stays text, and the parser refuses it.

        Raises:
            ValueError: The words have an unclosed quotation mark.
        """
        text = texts[-1].strip() if texts else ""
        if self.optional and not text:
            return None
        if self.many and self.choices:
            return texts
        if self.many and self.kind == "text":
            return shlex.split(text)
        if self.many:
            return [_parse_number(item.strip(), self.kind) for item in text.split(",")]
        if self.kind == "bool":
            return text in YES
        if self.kind == "json":
            try:
                return parse_json(text)
            except ValueError:
                return text
        return text if self.kind == "text" else _parse_number(text, self.kind)

    def write(self, value: Any) -> Any:
        """Return the text of a value, which may be invalid, or the list of ticked choices."""
        if self.many and self.choices:
            return value
        if self.kind == "json" and value is not None:
            return json.dumps(value)
        if isinstance(value, list):
            return shlex.join(map(_format, value)) if self.kind == "text" else ", ".join(map(_format, value))
        return _format(value)


# A section of the spec in a hidden input
HIDDEN_JSON = Field("json", optional=True, many=False, default=None, choices=(), limits="")


def read_fields(section: str, model: type[BaseModel], *, only: Iterable[str] | None = None) -> dict[str, Field]:
    """Return the flat fields of a model by dotted name. Nested models are separate sections."""
    found = {}
    for name, schema in model.model_json_schema(mode="serialization")["properties"].items():
        if only is not None and name not in only:
            continue
        field = _make_field(schema)
        if field is not None:
            found[f"{section}.{name}" if section else name] = field
    return found


def _make_field(schema: dict[str, Any]) -> Field | None:
    kinds = schema.get("anyOf", [schema])
    single = next(kind for kind in kinds if kind.get("type") != "null")
    many = single.get("type") == "array"
    item = single["items"] if many else single
    if item.get("type") not in KINDS_BY_TYPE:
        return None
    low, above, high = (item.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    limits = "" if high is None else f"above {above:,}, at most {high:,}" if low is None else f"{low:,} to {high:,}"
    return Field(
        kind=KINDS_BY_TYPE[item["type"]],  # type: ignore[arg-type]  # one of the four
        optional=len(kinds) > 1,
        many=many,
        default=schema.get("default"),
        choices=tuple(item.get("enum", ())),
        limits=limits,
    )


def parse_form(fields: Fields, form: MultiValueDict[str, str]) -> dict[str, Any]:
    """Return the nested, untrusted spec of a form, ready for `parse_spec`.

    Missing fields keep the default of the spec. A check box is not ticked if other fields of its section were sent.

    Raises:
        SpecError: A field cannot be split into words.
    """
    spec: dict[str, Any] = {}
    sent = {name.rpartition(".")[0] for name in fields if name in form}
    problems = []
    for name, field in fields.items():
        if name not in form and not (field.is_checkbox and name.rpartition(".")[0] in sent):
            continue
        try:
            _put(spec, name, field.read(form.getlist(name)))
        except ValueError as error:
            problems.append(
                Problem(name, f"`{name}` cannot be split into arguments: {error}. Close every quotation mark.")
            )
    if problems:
        raise SpecError(problems)
    return spec


def format_values(fields: Fields, spec: object) -> dict[str, Any]:
    """Return the texts of a form for a spec, which may be incomplete or invalid. Missing values get their defaults."""
    return {name: field.write(_get(spec, name, field.default)) for name, field in fields.items()}


def list_options(fields: Fields, words: Mapping[str, Mapping[str, str]], values: Mapping[str, str]) -> Options:
    """Return the choices of each field that has some, with the texts in `words`.

    A field without choices in the model offers those in `words`, and its current value.
    """
    options: Options = {}
    for name, field in fields.items():
        labels = words.get(name, {})
        offered = [(choice, labels.get(choice, choice.replace("_", " "))) for choice in field.choices or labels]
        current = values.get(name, "")
        if offered and not field.many and current and all(value != current for value, _ in offered):
            offered.append((current, current))
        if offered:
            options[name] = offered
    return options


def format_limits(fields: Fields) -> dict[str, str]:
    """Return the allowed range of each field as text."""
    return {name: field.limits for name, field in fields.items() if field.limits}


def format_defaults(fields: Fields) -> dict[str, str]:
    """Return the default of each number and choice as text. Fields without a default are left out."""
    shown = {name: field for name, field in fields.items() if field.kind in ("int", "float") and not field.many}
    return {name: field.write(field.default) for name, field in shown.items() if field.default is not None}


def sort_problems(
    problems: list[Problem], fields: Iterable[str], replacements: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return messages by the field that shows them, and lines for the other problems.

    Args:
        fields: Fields that can show a message.
        replacements: The field that shows the message of a field that is not in the form.
    """
    known = set(fields)
    messages: dict[str, str] = {}
    other: list[str] = []
    for problem in problems:
        name = _LIST_INDEX.sub("", problem.field)
        field = replacements.get(name, name)
        if field in known:
            messages[field] = " ".join(filter(None, [messages.get(field), problem.message]))
        else:
            other.append(problem.sentence)
    return messages, other


def _parse_number(text: str, kind: str) -> int | float | str:
    if _INTEGER.fullmatch(text.strip()):
        return int(text)
    if kind == "int":
        return text
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _put(spec: dict[str, Any], name: str, value: object) -> None:
    *path, last = name.split(".")
    for part in path:
        spec = spec.setdefault(part, {})
    spec[last] = value


def _get(spec: object, name: str, default: object) -> object:
    value = spec
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
