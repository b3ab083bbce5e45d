"""Parse the text of a config file: JSON, TOML, YAML, or command-line arguments."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from planner.facts.tool_layouts.shell_arguments import has_arguments, parse_arguments
from planner.facts.validation import Problem, SpecError

MAX_FILE_BYTES = 65_536
MAX_VALUES = 5_000  # per file, with each use of a YAML alias
MAX_DEPTH = 24
MAX_KEY_CHARACTERS = 200
FIELD = "text"
_KINDS = "Use TOML, YAML, JSON, or a script with arguments of Megatron-LM."
_TOML_TABLE = re.compile(r"^\s*\[{1,2}[\w.\"-]+\]{1,2}\s*(#.*)?$", re.MULTILINE)
_YAML_TAG = "tag:yaml.org,2002:"
# Scalars that the tools read. Without merge keys, whose copies can grow exponentially, and without dates.
_YAML_SCALARS = {
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"[Yy]es|YES|[Nn]o|NO|[Tt]rue|TRUE|[Ff]alse|FALSE|[Oo]n|ON|[Oo]ff|OFF", list("yYnNtTfFoO")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]{0,17})", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?", list("-+.0123456789")),
}


# The loader in C is 20 times as fast. Some builds of PyYAML lack it.
_FASTEST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FASTEST):  # type: ignore[misc]
    """Safe YAML loader whose scalars are text, numbers, booleans, and null."""

    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}


for _name, (_pattern, _first) in _YAML_SCALARS.items():
    _Loader.add_implicit_resolver(_YAML_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def refuse(message: str) -> SpecError:
    """Return the error of a file."""
    return SpecError([Problem(FIELD, message)])


def parse_document(text: str) -> dict[str, Any]:
    """Return the values of a file by their dotted keys. Arguments have keys that start with `--`.

    Raises:
        SpecError: The file is too large, or none of the known formats.
    """
    if len(text.encode(errors="replace")) > MAX_FILE_BYTES:
        raise refuse(f"The file is too long. Use a file of at most {MAX_FILE_BYTES // 1024} KiB.")
    if not text.strip():
        raise refuse("The file is empty. Paste the config file of a training tool.")
    try:
        data = _parse(text)
        if not isinstance(data, Mapping):
            raise refuse(f"The file is not a mapping of settings. {_KINDS}")
        found: dict[str, Any] = {}
        _flatten(data, "", 0, found, [0])
        json.dumps([*found, *found.values()], skipkeys=True, default=str, ensure_ascii=False).encode()
    except RecursionError:
        raise refuse(_describe_depth()) from None
    except UnicodeEncodeError as error:  # an escape such as \ud800
        raise refuse(f"The file contains {error.object[error.start]!a}. Use valid Unicode text.") from None
    return found


def _describe_depth() -> str:
    return f"The file is nested too deeply, or a YAML alias contains itself. Use at most {MAX_DEPTH} levels."


def _parse(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            return _parse_flow_mapping(text, error)
    if has_arguments(text):
        return parse_arguments(text)
    if _TOML_TABLE.search(text):
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise refuse(f"The file is not valid TOML: {error}. Correct the file.") from None
    try:
        _check_nesting(text)
        return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        text = f"The file cannot be read as YAML: {reason}."
        raise refuse(f"{text} {_KINDS}") from None


def _parse_flow_mapping(text: str, json_error: ValueError) -> Any:
    """Parse a YAML mapping in braces, which may have comments and a last comma, as in GPT-NeoX."""
    try:
        _check_nesting(text)
        return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError):
        raise refuse(f"The file is not valid JSON: {json_error}. Correct the file.") from None


def _check_nesting(text: str) -> None:
    """Check the nesting and the size before the loader, which is recursive, builds the values."""
    depth, count = 0, [0]
    for event in yaml.parse(text, _Loader):
        _count(1, count, limit=4 * MAX_VALUES)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise refuse(_describe_depth())


def _flatten(value: Mapping[Any, Any], prefix: str, depth: int, found: dict[str, Any], count: list[int]) -> None:
    if depth > MAX_DEPTH:
        raise refuse(_describe_depth())
    for name, inner in value.items():
        _count(1, count)
        key = f"{prefix}{name}"[:MAX_KEY_CHARACTERS]
        if isinstance(inner, Mapping) and inner:
            _flatten(inner, f"{key}.", depth + 1, found, count)
        else:
            _check_list(inner, depth + 1, count)
            found[key] = inner


def _check_list(value: object, depth: int, count: list[int]) -> None:
    """Check the size of a list, whose parts can be aliases of other lists."""
    if not isinstance(value, list | Mapping):
        return
    _count(len(value), count)
    if depth > MAX_DEPTH:
        raise refuse(_describe_depth())
    for inner in value.values() if isinstance(value, Mapping) else value:
        _check_list(inner, depth + 1, count)


def _count(number: int, count: list[int], limit: int = MAX_VALUES) -> None:
    count[0] += number
    if count[0] > limit:
        raise refuse(f"The file has more than {MAX_VALUES} values. Use a file with only the settings of one run.")
