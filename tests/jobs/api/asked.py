"""The API asked as its document says one may, each answer held against what the document says of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rest_framework.test import APIClient


def closed(part: Any) -> Any:
    """A schema in which objects have the fields that are told of and no others, and what is stored is not older."""
    if isinstance(part, list):
        return [closed(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    told = {name: closed(inner) for name, inner in part.items()}
    if isinstance(told.get("properties"), dict):
        told.setdefault("additionalProperties", False)
    if any("$ref" in choice for choice in told.get("anyOf", [])):
        told["anyOf"] = [
            choice for choice in told["anyOf"] if choice != {"type": "object", "additionalProperties": True}
        ]
    return told


class Asked:
    """Asks as the document says one may, and holds each answer against it. `operations`: where each is asked."""

    def __init__(self, document: Any) -> None:
        self._components = closed(document["components"])
        self._paths = document["paths"]
        self.operations = {
            operation["operationId"]: (path, method)
            for path, methods in self._paths.items()
            for method, operation in methods.items()
        }
        self.unasked = set(self.operations)

    def changing(self) -> set[str]:
        """Operations by whose method something may change."""
        return {operation for operation, (_, method) in self.operations.items() if method != "get"}

    def named(self, routes: Iterable[tuple[str, str]]) -> set[str]:
        """Of methods and routes, the operations."""
        of_route = {told: operation for operation, told in self.operations.items()}
        return {of_route["/" + re.sub(r"<\w+:(\w+)>", r"{\1}", route), method] for method, route in routes}

    def __call__(self, client: APIClient, operation: str, body: object = None, *, code: int = 200, **names: str) -> Any:
        path, method = self.operations[operation]
        return self.holds(operation, getattr(client, method)(path.format(**names), body, format="json"), code)

    def holds(self, operation: str, answer: Any, code: int = 200) -> Any:
        """What was answered, which is what the document says of it."""
        assert answer.status_code == code, answer.content
        path, method = self.operations[operation]
        said = self._paths[path][method]["responses"][str(code)]
        self.unasked -= {operation}
        if "content" not in said:
            assert not answer.content
            return None
        schema = closed(said["content"][answer["Content-Type"]]["schema"])
        assert wrong({**schema, "components": self._components}, answer.json()) == [], operation
        return answer.json()


def wrong(schema: Any, answer: Any) -> list[str]:
    """What of an answer is not as its schema says."""
    from jsonschema import Draft202012Validator  # seconds, which all that collect would take

    return [f"{error.json_path}: {error.message[:300]}" for error in Draft202012Validator(schema).iter_errors(answer)]
