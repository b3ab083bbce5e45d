"""`make openapi`: the Python client's types of what a board answers and takes, from docs/openapi.json."""

from __future__ import annotations

import json
import keyword
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from manual.build import ROOT

DOCUMENT = ROOT / "docs" / "openapi.json"
PLACE = ROOT / "client" / "meshboard" / "answers"
# Modules, lowest first, each with the schemas that the client's methods take or return. What one hangs on is with it,
# or in a module before it.
MODULES = {
    "layouts": ("Layout", "AutoSpec"),
    "models": ("ModelSpec", "SizedModel"),
    "specs": ("JobSpec", "StoredSpec", "SearchQuery", "JobChange"),
    "plans": ("Plan", "SearchResult", "Advice"),
    "runs": ("Results", "CheckpointTold", "Comparison", "History", "Rows"),
    "verdicts": ("Told",),
    "jobs": ("JobBrief", "JobDetail", "Waited"),
    "records": ("Baseline", "BranchBrief", "AuditRow"),
}
HEAD = '"""Made by `make openapi` of docs/openapi.json: change that."""\n\nfrom __future__ import annotations\n'
SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
WIDTH = 120
Schema = dict[str, Any]
Fields = Sequence[tuple[str, str, str]]  # name, type, words


def main() -> None:
    for left in PLACE.glob("*.py"):
        left.unlink()
    write(PLACE)
    print(f"{PLACE.name}: {len(MODULES)} modules")


def write(place: Path) -> None:
    """The package, into a folder that is there."""
    package = _Package(json.loads(DOCUMENT.read_text())["components"]["schemas"])
    for module in MODULES:
        (place / f"{module}.py").write_text(package.module(module))
    (place / "__init__.py").write_text(package.door())
    ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--config", str(ROOT / "pyproject.toml"), str(place)]
    subprocess.run(ruff, check=True)


class _Package:
    """Schemas as TypedDicts. One of which no field is known is a dict of anything."""

    def __init__(self, schemas: Schema) -> None:
        self._schemas = schemas
        self._homes: dict[str, str] = {}
        for module, roots in MODULES.items():
            for root in roots:
                for name in self._needed(root):
                    self._homes.setdefault(name, module)

    def module(self, module: str) -> str:
        ours = [name for name, home in self._homes.items() if home == module]
        others = {inner for name in ours for inner in self._references(self._schemas[name])} - {*ours}
        body = "\n\n".join(self._class(name, self._schemas[name]) for name in ours)
        typing = [word for word in ("Any", "Literal", "NotRequired", "TypedDict") if re.search(rf"\b{word}\b", body)]
        return "\n".join([HEAD, f"from typing import {', '.join(typing)}", "", *self._imports(others), "", body])

    def door(self) -> str:
        return "\n".join([HEAD, *self._imports(self._homes), "", f"__all__ = {sorted(self._homes)!r}", ""])

    def _needed(self, name: str) -> Iterator[str]:
        """A schema behind those that it hangs on."""
        for inner in self._references(self._schemas[name]):
            yield from self._needed(inner)
        yield name

    def _references(self, part: Any) -> Iterator[str]:
        if isinstance(part, list):
            for inner in part:
                yield from self._references(inner)
        elif isinstance(part, dict):
            if isinstance(part.get("$ref"), str) and self._is_known(part):
                yield _named(part)
            for inner in part.values():
                yield from self._references(inner)

    def _is_known(self, reference: Schema) -> bool:
        return bool(self._schemas[_named(reference)].get("properties"))

    def _imports(self, names: Collection[str]) -> list[str]:
        by_home: dict[str, list[str]] = {}
        for name in sorted(names, key=str.lower):
            by_home.setdefault(self._homes[name], []).append(name)
        return [f"from meshboard.answers.{home} import {', '.join(of)}" for home, of in sorted(by_home.items())]

    def _class(self, name: str, schema: Schema) -> str:
        """Behind those of objects in it that have no name of their own."""
        required = schema.get("required", [])
        order = [*required, *sorted(schema["properties"].keys() - set(required))]
        inner: list[str] = []
        fields: list[tuple[str, str, str]] = []
        for field in order:
            told = schema["properties"][field]
            owner = f"{name}{field.title().replace('_', '')}"
            inner += [self._class(owner, part) for part in told.get("anyOf", ()) if "properties" in part]
            type_ = self._type(told, owner)
            fields.append((field, type_ if field in required else f"NotRequired[{type_}]", told.get("description", "")))
        written = _as_call if any(keyword.iskeyword(field) for field in order) else _as_class
        return "\n\n".join([*inner, "\n".join(written(name, _doc(schema.get("description", "")), fields)) + "\n"])

    def _type(self, schema: Schema, owner: str) -> str:
        """`owner`: what an object is called that has no name."""
        if "$ref" in schema:
            return _named(schema) if self._is_known(schema) else "dict[str, Any]"
        if "anyOf" in schema:
            return self._any(schema["anyOf"], owner)
        if "const" in schema or "enum" in schema:
            return f"Literal[{', '.join(json.dumps(value) for value in schema.get('enum', [schema.get('const')]))}]"
        kind = schema.get("type")
        if kind == "array":  # a tuple of the document is a list as well: JSON has no other
            return f"list[{self._any(schema.get('prefixItems') or [schema['items']], owner)}]"
        if kind == "object":
            return owner if "properties" in schema else f"dict[str, {self._values(schema, owner)}]"
        return SCALARS[kind] if kind else "Any"

    def _any(self, choices: list[Schema], owner: str) -> str:
        return " | ".join(dict.fromkeys(self._type(one, owner) for one in choices))

    def _values(self, schema: Schema, owner: str) -> str:
        told = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
        return self._type(told, owner) if isinstance(told, dict) else "Any"


def _named(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _as_class(name: str, doc: list[str], fields: Fields) -> Iterator[str]:
    yield f"class {name}(TypedDict):"
    yield from _indented([*doc, ""])
    for field, type_, words in fields:
        yield from _indented([f"{field}: {type_}", *_doc(words)])


def _as_call(name: str, doc: list[str], fields: Fields) -> Iterator[str]:
    """Of one with a field that is a word of Python's."""
    yield f'{name} = TypedDict("{name}", {{'
    for field, type_, words in fields:
        yield f'    "{field}": {type_},' + (f"  # {words}" if words else "")
    yield "})"
    yield from doc


def _doc(words: str) -> list[str]:
    """As a docstring, which editors show of a field too."""
    if not words:
        return []
    lines = [
        line for part in words.split("\n\n") for line in ("", *textwrap.wrap(part, WIDTH - 8, break_on_hyphens=False))
    ][1:]
    quoted = "\n".join(lines).replace("\\", "\\\\")
    end = "\n" if len(lines) > 1 else " " if quoted.endswith('"') else ""
    return f'"""{quoted}{end}"""'.split("\n")


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


if __name__ == "__main__":
    main()
