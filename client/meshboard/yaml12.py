"""YAML as its version 1.2 reads it, which is what people mean: PyYAML reads 1.1, where `off` is false, 2026-11-23 a
date, 1e-3 a word and 1:30 ninety. What comes of it is what JSON can say."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from meshboard.errors import WrongError

PREFIX = "tag:yaml.org,2002:"
KINDS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": "<<",
}

JSON = {*KINDS, "str", "seq", "map"}


class Loader(yaml.SafeLoader):
    """Tells kinds of words apart as 1.2's core schema does, and `<<`, which specs share parts by."""

    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}  # 1.1's are left behind


for _kind, _pattern in KINDS.items():
    Loader.add_implicit_resolver(PREFIX + _kind, re.compile(rf"(?:{_pattern})\Z"), None)


def read(text: str | bytes, field: str = "") -> Any:
    """What a document says, bytes as UTF-8 or, with its mark, UTF-16; `field` is where in a spec it will stand.

    Raises:
        WrongError: a field stands twice, or is nothing that JSON has; names it.
        yaml.YAMLError: it is no YAML.
    """
    try:
        with suppress(ValueError):  # no JSON, or more than JSON: what is wrong with it, YAML says with its field
            return _json(text)
        node = yaml.compose(text, Loader)
        return None if node is None else _value(node, field)
    except RecursionError:
        raise WrongError("the document is nested too deeply, or contains itself") from None


def _json(text: str | bytes) -> Any:
    """YAML's reader takes no tab for a space, nor halves of letters, nor long keys. Raises ValueError."""
    found = json.loads(text, object_pairs_hook=_once, parse_constant=float)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # half a letter is no text, nan no number
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a field appears twice")
    return found


def _value(node: Node, field: str) -> Any:
    if node.tag.removeprefix(PREFIX) not in JSON:
        raise _wrong(field, f"has the tag {node.tag}, which JSON does not support")
    if isinstance(node, SequenceNode):
        return [_value(one, f"{field}.{place}".lstrip(".")) for place, one in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        return _scalar(node, field)
    found: dict[str, Any] = {}
    for name, value in _own(node, field):
        inner = f"{field}.{name}".lstrip(".")
        if name in found:
            raise _wrong(inner, f"appears twice (the second time in line {value.start_mark.line + 1})")
        found[name] = _value(value, inner)
    for merged in _merged(node):
        if not isinstance(merged, MappingNode):
            raise _wrong(field, "<< needs a mapping or a list of mappings")
        found = {**_value(merged, field), **found}
    return found


def _own(node: MappingNode, field: str) -> Iterator[tuple[str, Node]]:
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise _wrong(field, "field names need to be single words")
        if key.tag != PREFIX + "merge":
            yield key.value, value


def _merged(node: MappingNode) -> Iterator[Node]:
    """Of several the first goes before the others."""
    for key, value in node.value:
        if key.tag == PREFIX + "merge":
            yield from value.value if isinstance(value, SequenceNode) else [value]


def _scalar(node: Node, field: str) -> Any:
    kind, text = node.tag.removeprefix(PREFIX), node.value
    try:
        text.encode()
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return int(text, 10 if text.lstrip("+-").isdigit() else 0)
        number = float(re.sub(r"\.(?=inf|nan)", "", text.lower())) if kind == "float" else 0.0
    except ValueError as error:
        raise _wrong(field, str(error)) from None
    # JSON has no `.inf`: as a word the board refuses it where it stands, beside all else that is wrong.
    return number if kind == "float" and math.isfinite(number) else text


def _wrong(field: str, words: str) -> WrongError:
    if not field:
        return WrongError(words)
    return WrongError(f"{field}: {words}", field, "/" + field.replace(".", "/"))
