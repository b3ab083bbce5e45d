"""Incompatible changes between two OpenAPI documents of one version.

Requests of an old client stay valid, and the fields that it reads stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

METHODS = ("get", "put", "post", "patch", "delete", "head", "options")
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
CHOICES = ("anyOf", "oneOf")


def find_breaking_changes(old: Schema, new: Schema) -> list[str]:
    """Return the incompatible changes as "location: change"."""
    return list(dict.fromkeys(_Comparison(old, new).find_changes()))


class _Comparison:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new
        self._seen: set[tuple[str, str, bool]] = set()

    def find_changes(self) -> Iterator[str]:
        for path, methods in self._old["paths"].items():
            for method in METHODS:
                if method in methods:
                    found = self._new["paths"].get(path, {}).get(method)
                    where = f"{method.upper()} {path}"
                    if found is None:
                        yield f"{where}: is gone"
                    else:
                        yield from self._compare_operations(where, methods[method], found)

    def _compare_operations(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        if old["operationId"] != new["operationId"]:
            yield f"{where}: operationId changed from {old['operationId']} to {new['operationId']}"
        yield from self._compare_parameters(where, old.get("parameters", []), new.get("parameters", []))
        yield from self._compare_bodies(where, old.get("requestBody"), new.get("requestBody"))
        for code, answer in old["responses"].items():
            if code.startswith(("2", "3")):
                yield from self._compare_responses(f"{where} {code}", answer, new["responses"].get(code))

    def _compare_parameters(self, where: str, old: list[Schema], new: list[Schema]) -> Iterator[str]:
        known = {(one["in"], one["name"]): one for one in old}
        found = {(one["in"], one["name"]): one for one in new}
        for place, before in known.items():
            name = f"{where} {place[0]} {place[1]}"
            after = found.get(place)
            if after is None:
                yield f"{name}: is gone"
                continue
            if after.get("required") and not before.get("required"):
                yield f"{name}: the parameter is now required"
            yield from self._compare_sent(name, before.get("schema", {}), after.get("schema", {}))
        for place in found.keys() - known.keys():
            if found[place].get("required"):
                yield f"{where} {place[0]} {place[1]}: the new parameter is required"

    def _compare_bodies(self, where: str, old: Schema | None, new: Schema | None) -> Iterator[str]:
        if new is not None and new.get("required") and not (old or {}).get("required"):
            yield f"{where} body: the body is now required"
        if old is None:
            return
        for kind, content in old["content"].items():
            found = (new or {"content": {}})["content"].get(kind)
            if found is None:
                yield f"{where} body: media type {kind} is no longer accepted"
            else:
                yield from self._compare_sent(f"{where} body", content["schema"], found["schema"])

    def _compare_responses(self, where: str, old: Schema, new: Schema | None) -> Iterator[str]:
        if new is None:
            yield f"{where}: this response was removed"
            return
        for kind, content in old.get("content", {}).items():
            found = new.get("content", {}).get(kind)
            if found is None:
                yield f"{where}: media type {kind} is no longer returned"
            else:
                yield from self._compare_received(where, content["schema"], found["schema"])

    def _compare_sent(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        """Yield values of a request that are no longer accepted."""
        if self._was_compared(old, new, True):
            return
        old, new = _resolve(self._old, old), _resolve(self._new, new)
        yield from _compare_values(where, old, new)
        yield from _compare_bounds(where, old, new)
        for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
            yield f"{where}.{name}: the field is now required"
        closed = new.get("additionalProperties") is False
        for name, inner in old.get("properties", {}).items():
            found = new.get("properties", {}).get(name)
            if found is not None:
                yield from self._compare_sent(f"{where}.{name}", inner, found)
            elif closed or old.get("additionalProperties") is False:
                yield f"{where}.{name}: is gone"
        if closed and old.get("additionalProperties", True) is not False:
            yield f"{where}: additional fields are no longer accepted"
        yield from self._compare_nested(where, old, new, self._compare_sent)
        yield from self._compare_choices(where, old, new)

    def _compare_received(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        """Yield values of a response that are no longer returned."""
        if self._was_compared(old, new, False):
            return
        old, new = _resolve(self._old, old), _resolve(self._new, new)
        if "type" in old and _get_types(new) - _get_types(old):
            yield f"{where}: the type changed from {_describe(old)} to {_describe(new)}"
        for name in sorted(set(old.get("required", ())) - set(new.get("required", ()))):
            if name in new.get("properties", {}):
                yield f"{where}.{name}: the field is now optional"
        for name, inner in old.get("properties", {}).items():
            found = new.get("properties", {}).get(name)
            if found is None:
                yield f"{where}.{name}: is gone"
            else:
                yield from self._compare_received(f"{where}.{name}", inner, found)
        yield from self._compare_nested(where, old, new, self._compare_received)

    def _compare_nested(self, where: str, old: Schema, new: Schema, compare: Any) -> Iterator[str]:
        for name in ("items", "additionalProperties"):
            before, after = old.get(name), new.get(name)
            if isinstance(before, dict) and isinstance(after, dict):
                yield from compare(f"{where}[]", before, after)
        for before, after in zip(old.get("allOf", ()), new.get("allOf", ()), strict=False):
            yield from compare(where, before, after)
        for choices in CHOICES:
            pairs = _pair_choices(old.get(choices, ()), new.get(choices, ()))
            for before, after in pairs:
                yield from compare(where, before, after)

    def _compare_choices(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        for choices in CHOICES:
            narrowed = "type" in new or "$ref" in new
            after = new.get(choices) or ([new] if narrowed else ())
            for each in old.get(choices, ()):
                if after and not any(_is_similar(each, other) for other in after):
                    yield f"{where}: choice {_describe(each)} is no longer accepted"

    def _was_compared(self, old: Schema, new: Schema, sent: bool) -> bool:
        """Return whether two named schemas were compared before. Schemas can contain themselves."""
        key = (old.get("$ref", ""), new.get("$ref", ""), sent)
        if not key[0] or not key[1]:
            return False
        was_compared = key in self._seen
        self._seen.add(key)
        return was_compared


def _resolve(document: Schema, schema: Schema) -> Schema:
    while "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        found = document.get("components", {}).get("schemas", {}).get(name)
        if found is None:
            raise ValueError(f"the document has no schema {schema['$ref']}")
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def _compare_values(where: str, old: Schema, new: Schema) -> Iterator[str]:
    if "enum" in new or "const" in new:
        left = new.get("enum", [new["const"]] if "const" in new else [])
        known = old.get("enum", [old["const"]] if "const" in old else None)
        if known is None:
            yield f"{where}: only listed values are now accepted"
            return
        for value in known:
            if value not in left:
                yield f"{where}: value {value!r} is no longer accepted"
    if "type" in new and "type" in old and (gone := _get_types(old) - _get_types(new)):
        yield f"{where}: type {', '.join(sorted(gone))} is no longer accepted"


def _compare_bounds(where: str, old: Schema, new: Schema) -> Iterator[str]:
    for name in (*LOWER, *UPPER):
        before, after = old.get(name), new.get(name)
        tighter = after is not None and (before is None or (after > before if name in LOWER else after < before))
        if tighter and (before, after) != (None, 0):
            yield f"{where}: limit {name} changed from {before} to {after}"
    if new.get("pattern") not in (None, old.get("pattern")):
        yield f"{where}: the pattern changed from {old.get('pattern')} to {new['pattern']}"


def _get_types(schema: Schema) -> set[str]:
    types = schema.get("type", [])
    found = {types} if isinstance(types, str) else set(types)
    return found | {"integer"} if "number" in found else found


def _describe(schema: Schema) -> str:
    name = schema.get("$ref", "").rpartition("/")[2] or schema.get("type") or schema.get("const") or schema.get("enum")
    return str(name if name is not None else "anything")


def _is_similar(one: Schema, other: Schema) -> bool:
    return _describe(one) == _describe(other)


def _pair_choices(old: Any, new: Any) -> Iterator[tuple[Schema, Schema]]:
    """Yield pairs of similar choices, in the order of the old document."""
    for place, one in enumerate(old):
        index = sum(_is_similar(one, before) for before in old[:place])
        similar = [each for each in new if _is_similar(one, each)]
        if similar:
            yield one, similar[min(index, len(similar) - 1)]
