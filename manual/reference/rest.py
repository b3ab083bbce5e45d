"""REST, from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manual.reference.words import code, default, kind, plain, shape, table

HEAD = """# REST routes

This page lists every operation and object of the REST interface.
A board serves the same content as an OpenAPI document at `/api/v1/schema`.
Each request needs the header `Authorization: Token ...` or a login.
"""


def page() -> str:
    from jobs.api.document.schema import document  # asks for Django's settings

    told = document()
    parts = [HEAD]
    for group, operations in _groups(told["paths"]).items():
        parts.append(f"## {group}\n")
        for path, method, operation in operations:
            parts += _operation(path, method, operation)
    parts.append("## Shapes\n")
    for name, schema in sorted(told["components"]["schemas"].items()):
        parts += [f"### {name}\n", plain(schema.get("description", "")) + "\n", shape(schema) or kind(schema) + "\n"]
    return "\n".join(parts)


def _groups(paths: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    """Operations by the first word of their path after the version."""
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            found.setdefault(path.split("/")[3], []).append((path, method, operation))
    return dict(sorted(found.items()))


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {code(f'{method.upper()} {path}')}\n"
    yield plain(operation.get("summary", "") or operation.get("description", "")) + "\n"
    if operation.get("summary"):
        yield plain(operation.get("description", "")) + "\n"
    yield table(
        ["parameter", "in", "type", "default", "meaning"],
        (
            [
                code(one["name"]),
                one["in"],
                kind(one.get("schema", {})),
                default(one.get("schema", {}), required=one.get("required", False)),
                plain(one.get("description", "")),
            ]
            for one in operation.get("parameters", ())
        ),
    )
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        yield "Body: " + "; ".join(f"{name}, {kind(told.get('schema', {}))}" for name, told in body.items()) + "\n"
    yield table(["answer", "what", "meaning"], ([code(s), _answer(a), _said(a)] for s, a in _answers(operation)))


def _answers(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from operation["responses"].items()


def _answer(answer: dict[str, Any]) -> str:
    return "; ".join(f"{name}, {kind(told.get('schema', {}))}" for name, told in answer.get("content", {}).items())


def _said(answer: dict[str, Any]) -> str:
    return plain(answer.get("description", ""))
