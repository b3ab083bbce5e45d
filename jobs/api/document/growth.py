"""What an OpenAPI document promised and another one no longer does: within a version it only ever grows.

Whoever wrote a client against the older one must not notice: what he sends is still taken, what he reads still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

METHODS = ("get", "put", "post", "patch", "delete", "head", "options")
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
CHOICES = ("anyOf", "oneOf")


def shrunk(old: Schema, new: Schema) -> list[str]:
    """Every promise of `old` that `new` breaks, as "where: what"."""
    return list(dict.fromkeys(_Promises(old, new).broken()))


class _Promises:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new
        self._seen: set[tuple[str, str, bool]] = set()

    def broken(self) -> Iterator[str]:
        for path, methods in self._old["paths"].items():
            for method in METHODS:
                if method in methods:
                    found = self._new["paths"].get(path, {}).get(method)
                    where = f"{method.upper()} {path}"
                    if found is None:
                        yield f"{where}: is gone"
                    else:
                        yield from self._operation(where, methods[method], found)

    def _operation(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        if old["operationId"] != new["operationId"]:
            yield f"{where}: operationId changed from {old['operationId']} to {new['operationId']}"
        yield from self._parameters(where, old.get("parameters", []), new.get("parameters", []))
        yield from self._body(where, old.get("requestBody"), new.get("requestBody"))
        for code, answer in old["responses"].items():
            if code.startswith(("2", "3")):
                yield from self._answer(f"{where} {code}", answer, new["responses"].get(code))

    def _parameters(self, where: str, old: list[Schema], new: list[Schema]) -> Iterator[str]:
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
            yield from self._taken(name, before.get("schema", {}), after.get("schema", {}))
        for place in found.keys() - known.keys():
            if found[place].get("required"):
                yield f"{where} {place[0]} {place[1]}: the new parameter is required"

    def _body(self, where: str, old: Schema | None, new: Schema | None) -> Iterator[str]:
        if new is not None and new.get("required") and not (old or {}).get("required"):
            yield f"{where} body: the body is now required"
        if old is None:
            return
        for kind, content in old["content"].items():
            found = (new or {"content": {}})["content"].get(kind)
            if found is None:
                yield f"{where} body: media type {kind} is no longer accepted"
            else:
                yield from self._taken(f"{where} body", content["schema"], found["schema"])

    def _answer(self, where: str, old: Schema, new: Schema | None) -> Iterator[str]:
        if new is None:
            yield f"{where}: this response was removed"
            return
        for kind, content in old.get("content", {}).items():
            found = new.get("content", {}).get(kind)
            if found is None:
                yield f"{where}: media type {kind} is no longer returned"
            else:
                yield from self._told(where, content["schema"], found["schema"])

    def _taken(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        """What could be sent, and no longer can."""
        if self._met(old, new, True):
            return
        old, new = _resolved(self._old, old), _resolved(self._new, new)
        yield from _values(where, old, new)
        yield from _bounds(where, old, new)
        for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
            yield f"{where}.{name}: the field is now required"
        closed = new.get("additionalProperties") is False
        for name, inner in old.get("properties", {}).items():
            found = new.get("properties", {}).get(name)
            if found is not None:
                yield from self._taken(f"{where}.{name}", inner, found)
            elif closed or old.get("additionalProperties") is False:
                yield f"{where}.{name}: is gone"
        if closed and old.get("additionalProperties", True) is not False:
            yield f"{where}: additional fields are no longer accepted"
        yield from self._inside(where, old, new, self._taken)
        yield from self._choices(where, old, new)

    def _told(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        """What could be read, and no longer can."""
        if self._met(old, new, False):
            return
        old, new = _resolved(self._old, old), _resolved(self._new, new)
        if "type" in old and _types(new) - _types(old):
            yield f"{where}: the type changed from {_words(old)} to {_words(new)}"
        for name in sorted(set(old.get("required", ())) - set(new.get("required", ()))):
            if name in new.get("properties", {}):
                yield f"{where}.{name}: the field is now optional"
        for name, inner in old.get("properties", {}).items():
            found = new.get("properties", {}).get(name)
            if found is None:
                yield f"{where}.{name}: is gone"
            else:
                yield from self._told(f"{where}.{name}", inner, found)
        yield from self._inside(where, old, new, self._told)

    def _inside(self, where: str, old: Schema, new: Schema, compare: Any) -> Iterator[str]:
        for name in ("items", "additionalProperties"):
            before, after = old.get(name), new.get(name)
            if isinstance(before, dict) and isinstance(after, dict):
                yield from compare(f"{where}[]", before, after)
        for before, after in zip(old.get("allOf", ()), new.get("allOf", ()), strict=False):
            yield from compare(where, before, after)
        for choices in CHOICES:
            pairs = _pairs(old.get(choices, ()), new.get(choices, ()))
            for before, after in pairs:
                yield from compare(where, before, after)

    def _choices(self, where: str, old: Schema, new: Schema) -> Iterator[str]:
        for choices in CHOICES:
            narrowed = "type" in new or "$ref" in new
            after = new.get(choices) or ([new] if narrowed else ())
            for each in old.get(choices, ()):
                if after and not any(_alike(each, other) for other in after):
                    yield f"{where}: choice {_words(each)} is no longer accepted"

    def _met(self, old: Schema, new: Schema, sent: bool) -> bool:
        """Whether two named schemas were compared before: they may hold themselves."""
        key = (old.get("$ref", ""), new.get("$ref", ""), sent)
        if not key[0] or not key[1]:
            return False
        met = key in self._seen
        self._seen.add(key)
        return met


def _resolved(document: Schema, schema: Schema) -> Schema:
    while "$ref" in schema:
        found: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def _values(where: str, old: Schema, new: Schema) -> Iterator[str]:
    if "enum" in new or "const" in new:
        left = new.get("enum", [new["const"]] if "const" in new else [])
        known = old.get("enum", [old["const"]] if "const" in old else None)
        if known is None:
            yield f"{where}: only listed values are now accepted"
            return
        for value in known:
            if value not in left:
                yield f"{where}: value {value!r} is no longer accepted"
    if "type" in new and "type" in old and (gone := _types(old) - _types(new)):
        yield f"{where}: type {', '.join(sorted(gone))} is no longer accepted"


def _bounds(where: str, old: Schema, new: Schema) -> Iterator[str]:
    for name in (*LOWER, *UPPER):
        before, after = old.get(name), new.get(name)
        tighter = after is not None and (before is None or (after > before if name in LOWER else after < before))
        if tighter and (before, after) != (None, 0):
            yield f"{where}: limit {name} changed from {before} to {after}"
    if new.get("pattern") not in (None, old.get("pattern")):
        yield f"{where}: the pattern changed from {old.get('pattern')} to {new['pattern']}"


def _types(schema: Schema) -> set[str]:
    told = schema.get("type", [])
    found = {told} if isinstance(told, str) else set(told)
    return found | {"integer"} if "number" in found else found


def _words(schema: Schema) -> str:
    told = schema.get("$ref", "").rpartition("/")[2] or schema.get("type") or schema.get("const") or schema.get("enum")
    return str(told if told is not None else "anything")


def _alike(one: Schema, other: Schema) -> bool:
    return _words(one) == _words(other)


def _pairs(old: Any, new: Any) -> Iterator[tuple[Schema, Schema]]:
    """Choices that are the same one: alike, and in the same order among those."""
    for place, one in enumerate(old):
        nth = sum(_alike(one, before) for before in old[:place])
        alike = [each for each in new if _alike(one, each)]
        if alike:
            yield one, alike[min(nth, len(alike) - 1)]
