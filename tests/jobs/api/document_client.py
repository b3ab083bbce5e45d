"""Client that calls operations of the OpenAPI document, and validates the responses against it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rest_framework.test import APIClient


def close_schema(part: Any) -> Any:
    """Return a schema that allows no undocumented fields and no specs of older versions."""
    if isinstance(part, list):
        return [close_schema(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    schema = {name: close_schema(inner) for name, inner in part.items()}
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    if any("$ref" in choice for choice in schema.get("anyOf", [])):
        schema["anyOf"] = [
            choice for choice in schema["anyOf"] if choice != {"type": "object", "additionalProperties": True}
        ]
    return schema


class DocumentClient:
    """Calls operations by their id, and checks that each response matches the document."""

    def __init__(self, document: Any) -> None:
        self._components = close_schema(document["components"])
        self._paths = document["paths"]
        self.operations = {
            operation["operationId"]: (path, method)
            for path, methods in self._paths.items()
            for method, operation in methods.items()
        }
        self.untested = set(self.operations)

    def list_changing_operations(self) -> set[str]:
        """Return the operations whose method can change data."""
        return {operation for operation, (_, method) in self.operations.items() if method != "get"}

    def find_operations(self, routes: Iterable[tuple[str, str]]) -> set[str]:
        """Return the operations of routes, given as pairs of route and method."""
        operations = {route: operation for operation, route in self.operations.items()}
        return {operations["/" + re.sub(r"<\w+:(\w+)>", r"{\1}", route), method] for method, route in routes}

    def __call__(self, client: APIClient, operation: str, body: object = None, *, code: int = 200, **names: str) -> Any:
        path, method = self.operations[operation]
        return self.check(operation, getattr(client, method)(path.format(**names), body, format="json"), code)

    def check(self, operation: str, result: Any, code: int = 200) -> Any:
        """Return the content of a response after its validation."""
        assert result.status_code == code, result.content
        path, method = self.operations[operation]
        response = self._paths[path][method]["responses"][str(code)]
        self.untested -= {operation}
        if "content" not in response:
            assert not result.content
            return None
        schema = close_schema(response["content"][result["Content-Type"]]["schema"])
        assert list_differences({**schema, "components": self._components}, result.json()) == [], operation
        return result.json()


def list_differences(schema: Any, result: Any) -> list[str]:
    """Return the differences between a response and its schema."""
    from jsonschema import Draft202012Validator  # The import takes seconds, so it is not at the top.

    return [f"{error.json_path}: {error.message[:300]}" for error in Draft202012Validator(schema).iter_errors(result)]
