"""Page of the REST routes, from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manual.reference.markdown import (
    describe_type,
    escape_markdown,
    format_code,
    format_default,
    format_fields,
    format_table,
)

HEAD = """# REST routes

This page lists every operation and object of the REST interface.
A board serves the same content as an OpenAPI document at `/api/v1/schema`.
Each request needs the header `Authorization: Token ...` or a login.
"""


def build_page() -> str:
    """Return the Markdown of the page."""
    from jobs.api.openapi import get_document  # needs Django settings

    content = get_document()
    parts = [HEAD]
    for group, operations in _groups(content["paths"]).items():
        parts.append(f"## {group}\n")
        for path, method, operation in operations:
            parts += _operation(path, method, operation)
    parts.append("## Shapes\n")
    for name, schema in sorted(content["components"]["schemas"].items()):
        parts += [
            f"### {name}\n",
            escape_markdown(schema.get("description", "")) + "\n",
            format_fields(schema) or describe_type(schema) + "\n",
        ]
    return "\n".join(parts)


def _groups(paths: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    """Return operations by the first part of their path after the version."""
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            found.setdefault(path.split("/")[3], []).append((path, method, operation))
    return dict(sorted(found.items()))


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {format_code(f'{method.upper()} {path}')}\n"
    yield escape_markdown(operation.get("summary", "") or operation.get("description", "")) + "\n"
    if operation.get("summary"):
        yield escape_markdown(operation.get("description", "")) + "\n"
    yield format_table(
        ["parameter", "in", "type", "default", "meaning"],
        (
            [
                format_code(one["name"]),
                one["in"],
                describe_type(one.get("schema", {})),
                format_default(one.get("schema", {}), required=one.get("required", False)),
                escape_markdown(one.get("description", "")),
            ]
            for one in operation.get("parameters", ())
        ),
    )
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        yield (
            "Body: "
            + "; ".join(f"{name}, {describe_type(media.get('schema', {}))}" for name, media in body.items())
            + "\n"
        )
    responses = operation["responses"].items()
    rows = ([format_code(status), _format_response(one), _describe(one)] for status, one in responses)
    yield format_table(["answer", "what", "meaning"], rows)


def _format_response(answer: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}, {describe_type(media.get('schema', {}))}" for name, media in answer.get("content", {}).items()
    )


def _describe(answer: dict[str, Any]) -> str:
    return escape_markdown(answer.get("description", ""))
