"""Job specs in YAML 1.2 or JSON, from a file or standard input.

PyYAML reads YAML 1.1, in which `off` is false, 2026-11-23 a date, 1e-3 text, and 1:30 the number 90.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from meshboard.errors import WrongError, format_error

NO_MAPPING = {type(None): "empty", list: "a list", str: "text"}
PREFIX = "tag:yaml.org,2002:"
# Scalars of the core schema of YAML 1.2, and `<<`, with which a spec shares parts.
SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": "<<",
}
JSON_TAGS = {*SCALARS, "str", "seq", "map"}


class SpecFileError(WrongError):
    """A file or an option cannot be read. The message names the file or the field."""


class Loader(yaml.SafeLoader):
    """YAML loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}  # without those of YAML 1.1


for _tag, _pattern in SCALARS.items():
    Loader.add_implicit_resolver(PREFIX + _tag, re.compile(rf"(?:{_pattern})\Z"), None)


def read_spec(name: str | None, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the spec in a file, changed by options such as `layout.dp=2`. The name `-` is standard input.

    Without a name, the spec consists of the changes.

    Raises:
        SpecFileError: The file cannot be read, or is not a mapping.
    """
    try:
        spec = {} if name is None else parse_yaml(read_file(name))
    except (OSError, ValueError) as error:
        raise SpecFileError(f"{name}: {format_error(error)}") from None
    except WrongError as error:
        raise SpecFileError(f"{name}: {error}", error.field, error.pointer) from None
    except yaml.YAMLError as error:
        raise SpecFileError(f"{name} is neither YAML nor JSON: {_join_lines(error)}") from None
    if not isinstance(spec, dict):
        raise SpecFileError(f"{name}: The spec is {NO_MAPPING.get(type(spec), 'a single value')}. Use a mapping.")
    change_spec(spec, changes)
    return spec


def change_spec(spec: dict[str, Any], changes: Sequence[str]) -> None:
    """Apply options such as `layout.dp=2` to a spec.

    Raises:
        SpecFileError: An option cannot be read.
    """
    for change in changes:
        _set_field(spec, change)


# Other parts of a measured step are fields of its layout.
MEASURED_STEP_FIELDS = ("micro_batches", "global_batch", "seq_len", "step_s", "tokens_per_s_per_gpu")


def read_measured_step(text: str) -> dict[str, Any]:
    """Return the measured step in text such as `tp=2,dp=4,micro_batches=8,step_s=1.35`.

    Raises:
        SpecFileError: A part of the text cannot be read.
    """
    step: dict[str, Any] = {"layout": {}}
    for part in map(str.strip, text.split(",")):
        is_own = part.partition("=")[0] in MEASURED_STEP_FIELDS
        _set_field(step, part if is_own else f"layout.{part.removeprefix('layout.')}", "--measured-step")
    return step


def read_file(name: str) -> bytes:
    """Return the bytes of a file, or of standard input for `-`.

    Raises:
        OSError
    """
    if name != "-":
        return Path(name).read_bytes()
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return sys.stdin.buffer.read()


def _set_field(spec: dict[str, Any], change: str, option: str = "--set") -> None:
    path, equals, value = change.partition("=")
    if not equals or not all(path.split(".")):
        raise SpecFileError(f"{option} {change!r}: Use FIELD=VALUE, such as layout.dp=2.")
    *parents, name = path.split(".")
    for parent in parents:
        spec = spec.setdefault(parent, {})
        if not isinstance(spec, dict):
            raise SpecFileError(f"{option} {change!r}: {parent!r} is a single value, so it has no fields.")
    try:
        spec[name] = parse_yaml(value, path)
    except yaml.YAMLError as error:
        raise SpecFileError(f"{option} {change!r}: {_join_lines(error)}", path) from None
    except WrongError as error:
        raise SpecFileError(f"{option} {change!r}: {error}", error.field, error.pointer) from None


def _join_lines(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def parse_yaml(text: str | bytes, field: str = "") -> Any:
    """Return a YAML 1.2 or JSON document as JSON values.

    Args:
        text: Text, or bytes in UTF-8 or in UTF-16 with a byte order mark.
        field: Name of the field in a spec to which the value belongs.

    Raises:
        WrongError: A field appears twice, or has a value that JSON does not have.
        yaml.YAMLError: The text is not YAML.
    """
    try:
        with suppress(ValueError):  # not JSON. The YAML parser reports errors with their field
            return _parse_json(text)
        node = yaml.compose(text, Loader)
        return None if node is None else _convert_node(node, field)
    except RecursionError:
        raise WrongError("the document is nested too deeply, or contains itself") from None


def _parse_json(text: str | bytes) -> Any:
    """Return a JSON document. PyYAML rejects some JSON: tabs, surrogate pairs, and long keys.

    Raises:
        ValueError: The text is not JSON, or has a lone surrogate or a NaN.
    """
    found = json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=float)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return found


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a field appears twice")
    return found


def _convert_node(node: Node, field: str) -> Any:
    if node.tag.removeprefix(PREFIX) not in JSON_TAGS:
        raise _field_error(field, f"has the tag {node.tag}, which JSON does not support")
    if isinstance(node, SequenceNode):
        return [_convert_node(item, f"{field}.{index}".lstrip(".")) for index, item in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        return _convert_scalar(node, field)
    found: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise _field_error(field, "field names need to be single words")
        if key.tag == PREFIX + "merge":
            continue
        inner = f"{field}.{key.value}".lstrip(".")
        if key.value in found:
            raise _field_error(inner, f"appears twice (the second time in line {value.start_mark.line + 1})")
        found[key.value] = _convert_node(value, inner)
    for merged in _get_merged_nodes(node):
        if not isinstance(merged, MappingNode):
            raise _field_error(field, "<< needs a mapping or a list of mappings")
        found = {**_convert_node(merged, field), **found}  # an earlier mapping has priority
    return found


def _get_merged_nodes(node: MappingNode) -> Iterator[Node]:
    for key, value in node.value:
        if key.tag == PREFIX + "merge":
            yield from value.value if isinstance(value, SequenceNode) else [value]


def _convert_scalar(node: Node, field: str) -> Any:
    tag, text = node.tag.removeprefix(PREFIX), node.value
    try:
        text.encode()
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "int":
            return int(text, 10 if text.lstrip("+-").isdigit() else 0)
        number = float(re.sub(r"\.(?=inf|nan)", "", text.lower())) if tag == "float" else 0.0
    except ValueError as error:
        raise _field_error(field, str(error)) from None
    # JSON has no infinity. The board rejects the text together with all other problems of the spec.
    return number if tag == "float" and math.isfinite(number) else text


def _field_error(field: str, words: str) -> WrongError:
    if not field:
        return WrongError(words)
    return WrongError(f"{field}: {words}", field, "/" + field.replace(".", "/"))
