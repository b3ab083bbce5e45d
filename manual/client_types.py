"""Write types of REST requests and responses for the Python client, from docs/openapi.json (`make openapi`)."""

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
TARGET = ROOT / "client" / "meshboard" / "answers"
# Modules in the order of their imports, each with schemas of client methods. Referenced schemas are in the same module
# or in an earlier one.
MODULES = {
    "layouts": ("Layout", "AutoSpec"),
    "models": ("ModelSpec", "SizedModel"),
    "specs": ("JobSpec", "StoredSpec", "SearchRequest", "JobChange"),
    "plans": ("Plan", "SearchResult", "Advice", "ImportedModel", "ImportedLayout"),
    "runs": ("Results", "StoredCheckpoint", "Comparison", "History", "TableRows"),
    "verdicts": ("VerdictPayload",),
    "jobs": ("JobBrief", "JobDetail", "WaitResult"),
    "records": ("Baseline", "BranchBrief", "AuditRow", "UploadDetail"),
}
HEAD = '"""Made by `make openapi` of docs/openapi.json: change that."""\n\nfrom __future__ import annotations\n'
SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
WIDTH = 120
Schema = dict[str, Any]
Fields = Sequence[tuple[str, str, str]]  # name, type, words


def main() -> None:
    for left in TARGET.glob("*.py"):
        left.unlink()
    write_package(TARGET)
    print(f"{TARGET.name}: {len(MODULES)} modules")


def write_package(place: Path) -> None:
    """Write the package into an existing folder."""
    package = _Package(json.loads(DOCUMENT.read_text())["components"]["schemas"])
    for module in MODULES:
        (place / f"{module}.py").write_text(package.module(module))
    (place / "__init__.py").write_text(package.init_module())
    ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--config", str(ROOT / "pyproject.toml"), str(place)]
    subprocess.run(ruff, check=True)


class _Package:
    """Schemas as TypedDicts. A schema without fields is a dict."""

    def __init__(self, schemas: Schema) -> None:
        self._schemas = schemas
        self._homes: dict[str, str] = {}
        for module, roots in MODULES.items():
            for root in roots:
                for name in self._order_schemas(root):
                    self._homes.setdefault(name, module)

    def module(self, module: str) -> str:
        ours = [name for name, home in self._homes.items() if home == module]
        others = {inner for name in ours for inner in self._references(self._schemas[name])} - {*ours}
        body = "\n\n".join(self._class(name, self._schemas[name]) for name in ours)
        typing = [word for word in ("Any", "Literal", "NotRequired", "TypedDict") if re.search(rf"\b{word}\b", body)]
        return "\n".join([HEAD, f"from typing import {', '.join(typing)}", "", *self._imports(others), "", body])

    def init_module(self) -> str:
        return "\n".join([HEAD, *self._imports(self._homes), "", f"__all__ = {sorted(self._homes)!r}", ""])

    def _order_schemas(self, name: str) -> Iterator[str]:
        """Yield the schemas that a schema references, then the schema."""
        for inner in self._references(self._schemas[name]):
            yield from self._order_schemas(inner)
        yield name

    def _references(self, part: Any) -> Iterator[str]:
        if isinstance(part, list):
            for inner in part:
                yield from self._references(inner)
        elif isinstance(part, dict):
            if isinstance(part.get("$ref"), str) and self._is_known(part):
                yield _get_name(part)
            for inner in part.values():
                yield from self._references(inner)

    def _is_known(self, reference: Schema) -> bool:
        return bool(self._schemas[_get_name(reference)].get("properties"))

    def _imports(self, names: Collection[str]) -> list[str]:
        by_home: dict[str, list[str]] = {}
        for name in sorted(names, key=str.lower):
            by_home.setdefault(self._homes[name], []).append(name)
        return [f"from meshboard.answers.{home} import {', '.join(of)}" for home, of in sorted(by_home.items())]

    def _class(self, name: str, schema: Schema) -> str:
        """Return the class of a schema, after the classes of its unnamed objects."""
        required = schema.get("required", [])
        order = [*required, *sorted(schema["properties"].keys() - set(required))]
        inner: list[str] = []
        fields: list[tuple[str, str, str]] = []
        for field in order:
            described = schema["properties"][field]
            owner = f"{name}{field.title().replace('_', '')}"
            inner += [self._class(owner, part) for part in described.get("anyOf", ()) if "properties" in part]
            type_ = self._type(described, owner)
            fields.append(
                (field, type_ if field in required else f"NotRequired[{type_}]", described.get("description", ""))
            )
        write = _write_call if any(keyword.iskeyword(field) for field in order) else _write_class
        return "\n\n".join(
            [*inner, "\n".join(write(name, _make_docstring(schema.get("description", "")), fields)) + "\n"]
        )

    def _type(self, schema: Schema, owner: str) -> str:
        """Return the type of a schema. `owner` is the name of an unnamed object."""
        if "$ref" in schema:
            return _get_name(schema) if self._is_known(schema) else "dict[str, Any]"
        if "anyOf" in schema:
            return self._any(schema["anyOf"], owner)
        if "const" in schema or "enum" in schema:
            return f"Literal[{', '.join(json.dumps(value) for value in schema.get('enum', [schema.get('const')]))}]"
        kind = schema.get("type")
        if kind == "array":  # JSON has no tuples
            return f"list[{self._any(schema.get('prefixItems') or [schema['items']], owner)}]"
        if kind == "object":
            return owner if "properties" in schema else f"dict[str, {self._values(schema, owner)}]"
        return SCALARS[kind] if kind else "Any"

    def _any(self, choices: list[Schema], owner: str) -> str:
        return " | ".join(dict.fromkeys(self._type(one, owner) for one in choices))

    def _values(self, schema: Schema, owner: str) -> str:
        values = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
        return self._type(values, owner) if isinstance(values, dict) else "Any"


def _get_name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _write_class(name: str, doc: list[str], fields: Fields) -> Iterator[str]:
    yield f"class {name}(TypedDict):"
    yield from _indent([*doc, ""])
    for field, type_, words in fields:
        yield from _indent([f"{field}: {type_}", *_make_docstring(words)])


def _write_call(name: str, doc: list[str], fields: Fields) -> Iterator[str]:
    """Yield a TypedDict call, for fields that are Python keywords."""
    yield f'{name} = TypedDict("{name}", {{'
    for field, type_, words in fields:
        yield f'    "{field}": {type_},' + (f"  # {words}" if words else "")
    yield "})"
    yield from doc


def _make_docstring(words: str) -> list[str]:
    """Return the lines of a docstring. Editors show docstrings of fields too."""
    if not words:
        return []
    lines = [
        line for part in words.split("\n\n") for line in ("", *textwrap.wrap(part, WIDTH - 8, break_on_hyphens=False))
    ][1:]
    quoted = "\n".join(lines).replace("\\", "\\\\")
    end = "\n" if len(lines) > 1 else " " if quoted.endswith('"') else ""
    return f'"""{quoted}{end}"""'.split("\n")


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


if __name__ == "__main__":
    main()
