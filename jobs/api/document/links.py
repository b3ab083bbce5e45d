"""Links of the OpenAPI document: what may be asked next of what an answer has just made."""

from __future__ import annotations

from typing import Any, NamedTuple

MADE = "201"


class Made(NamedTuple):
    """Where a thing has its path, and what fills the path's parameters: expressions of OpenAPI 3, section 4.8.20.4."""

    path: str
    parameters: dict[str, str]


ID = "$response.body#/id"
OF_PROJECT = {"project": "$request.path.project", "key": ID}
THINGS = {
    "JobDetail": Made("/api/v1/jobs/{job_id}", {"job_id": ID}),
    "ProjectDetail": Made("/api/v1/projects/{project}", {"project": "$response.body#/name"}),
    "NewWebhook": Made("/api/v1/projects/{project}/webhooks/{key}", OF_PROJECT),
    "NewInvitation": Made("/api/v1/projects/{project}/invitations/{key}", OF_PROJECT),
    "ImportDetail": Made("/api/v1/imports/{key}", {"key": ID}),
    "NewJoinToken": Made("/api/v1/join-tokens/{key}", {"key": ID}),
    "NewApiToken": Made("/api/v1/tokens/{key}", {"key": "$response.body#/key"}),
}


def with_links(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """drf-spectacular's hook: an answer that has made something links to each operation on it that needs no more."""
    paths = result["paths"]
    links = {name: _links(paths, made) for name, made in THINGS.items()}
    result["components"]["links"] = {name: link for found in links.values() for name, link in found.items()}
    for operation in (operation for path in paths.values() for operation in path.values()):
        answer = operation["responses"].get(MADE, {})
        named = answer.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", "")
        found = links.get(named.rpartition("/")[2], {})
        if found:
            answer["links"] = {name: {"$ref": f"#/components/links/{name}"} for name in found}
    return result


def _links(paths: dict[str, Any], made: Made) -> dict[str, Any]:
    return {
        operation["operationId"]: {"operationId": operation["operationId"], "parameters": made.parameters}
        for path, operations in paths.items()
        if path == made.path or path.startswith(f"{made.path}/")
        for operation in operations.values()
        if path.count("{") == len(made.parameters)
    }
