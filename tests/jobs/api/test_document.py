"""The OpenAPI document is valid and complete, and the server conforms to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from planner.facts.spec import JobSpec
from tests.support.fuzz import run_fuzz
from tests.support.web import Site


@pytest.fixture
def document(owner: User, api: Callable[[User | None], APIClient]) -> Any:
    return api(owner).get("/api/v1/schema").json()


def find_references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from find_references(inner)
    if isinstance(part, list):
        for inner in part:
            yield from find_references(inner)


def test_document_is_valid_and_references_resolve(document: Any) -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator  # The import takes seconds, so it is not at the top.

    assert document["openapi"].startswith("3.1")
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    names = {f"#/components/{kind}/{name}" for kind in ("schemas", "links") for name in document["components"][kind]}
    found = set(find_references(document))
    assert "#/components/schemas/MoeSpec" in found
    assert found <= names


def test_links_connect_created_objects_to_operations(document: Any) -> None:
    paths, links = document["paths"], document["components"]["links"]
    operations = {one["operationId"]: path for path, each in paths.items() for one in each.values()}
    for name, link in links.items():
        assert operations[name].count("{") == len(link["parameters"])
        assert all(f"{{{parameter}}}" in operations[name] for parameter in link["parameters"])
    submit_links, invite_links = (
        paths[path]["post"]["responses"]["201"]["links"]
        for path in ("/api/v1/jobs", "/api/v1/projects/{project}/invitations")
    )
    assert {"getJob", "cancelJob", "waitForJob", "getResults", "copyJob"} <= set(submit_links)
    assert not {"readLog", "getHistoryTable"} & set(submit_links), "their other parameters are unknown"
    assert set(invite_links) == {"revokeInvitation"}
    assert links["revokeInvitation"]["parameters"] == {
        "project": "$request.path.project",
        "key": "$response.body#/id",
    }


def test_schema_names_are_identifiers(document: Any) -> None:
    """Client generators use these names as class names."""
    assert [name for name in document["components"]["schemas"] if not name.isalnum()] == []


def test_stored_spec_has_a_layout_and_model_sizes(document: Any) -> None:
    """A submitted spec can have the layout "auto" and a preset name, but a stored spec cannot."""
    schemas = document["components"]["schemas"]
    fields = schemas["StoredSpec"]["properties"]
    assert set(fields) == set(JobSpec.model_fields)
    assert (fields["layout"], fields["model"]) == (
        {"$ref": "#/components/schemas/Layout"},
        {"$ref": "#/components/schemas/SizedModel"},
    )
    assert schemas["JobDetail"]["properties"]["spec"] == {"$ref": "#/components/schemas/StoredSpec"}


def test_spec_schema_matches_the_model(document: Any) -> None:
    schemas = document["components"]["schemas"]["JobSpec"]["properties"]
    assert set(schemas) == set(JobSpec.model_fields)
    assert schemas["dry_ranks"]["maxItems"] == 64
    body = document["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["allOf"] == [{"$ref": "#/components/schemas/Submission"}]


# Their bodies are specs with thousands of cases each, which `make schemathesis` runs.
SLOW_OPERATIONS = {"submitJob", "searchPlans", "plan", "explainPlan", "runPrimitive"}
# Other users get 403 from these. `make schemathesis` also runs them as staff.
STAFF_OPERATIONS = {
    *("calibrateHost", "drainHost", "undrainHost", "giveUpHost", "removeHost"),
    *("listJoinTokens", "makeJoinToken", "revokeJoinToken"),
    *("actOnQueue", "moveInQueue", "pauseQueue", "resumeQueue", "pausePool", "resumePool", "listAudit"),
}


OPERATION_STRIDE = 6  # Every sixth operation is tested.


@pytest.mark.extended
def test_server_conforms_to_the_document(postgres_site: Site, tmp_path: Path, document: Any) -> None:
    """Run the coverage phase for some operations. `make schemathesis` runs all phases and operations."""
    before = postgres_site.log.count("Traceback")
    operations = {one["operationId"] for path in document["paths"].values() for one in path.values()}
    operation_ids = sorted(operations - SLOW_OPERATIONS - STAFF_OPERATIONS)[::OPERATION_STRIDE]
    options = [part for operation in operation_ids for part in ("--include-operation-id", operation)]
    result = run_fuzz(postgres_site, tmp_path, "owner", "--phases", "examples,coverage", *options)
    assert result.passed, result.text
    assert result.cases >= 100
    assert postgres_site.log.count("Traceback") == before
