"""The OpenAPI document: valid, whole, and true of what the server does."""

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


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    if isinstance(part, list):
        for inner in part:
            yield from references(inner)


def test_it_is_valid_3_1_and_every_reference_resolves(document: Any) -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator  # seconds, which all that collect would take

    assert document["openapi"].startswith("3.1")
    assert [str(error) for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    named = {f"#/components/{kind}/{name}" for kind in ("schemas", "links") for name in document["components"][kind]}
    found = set(references(document))
    assert "#/components/schemas/MoeSpec" in found
    assert found <= named


def test_links_lead_from_what_was_made_to_what_may_be_asked_of_it(document: Any) -> None:
    paths, links = document["paths"], document["components"]["links"]
    operations = {one["operationId"]: path for path, each in paths.items() for one in each.values()}
    for name, link in links.items():
        assert operations[name].count("{") == len(link["parameters"])
        assert all(f"{{{taken}}}" in operations[name] for taken in link["parameters"])
    submitted, invited = (
        paths[path]["post"]["responses"]["201"]["links"]
        for path in ("/api/v1/jobs", "/api/v1/projects/{project}/invitations")
    )
    assert {"getJob", "cancelJob", "waitForJob", "getResults", "copyJob"} <= set(submitted)
    assert not {"readLog", "getHistoryTable"} & set(submitted), "of which nobody knows the rank or the table"
    assert set(invited) == {"revokeInvitation"}
    assert links["revokeInvitation"]["parameters"] == {
        "project": "$request.path.project",
        "key": "$response.body#/id",
    }


def test_its_types_are_named_after_what_they_are_and_not_after_where_our_code_lies(document: Any) -> None:
    """Two of one name get those of their modules before them: generators of clients make class names of it."""
    assert [name for name in document["components"]["schemas"] if not name.isalnum()] == []


def test_a_spec_that_is_told_has_a_layout_and_sizes(document: Any) -> None:
    """Where it was submitted, a layout may be "auto" and a model a preset's name."""
    described = document["components"]["schemas"]
    told = described["StoredSpec"]["properties"]
    assert set(told) == set(JobSpec.model_fields)
    assert (told["layout"], told["model"]) == (
        {"$ref": "#/components/schemas/Layout"},
        {"$ref": "#/components/schemas/SizedModel"},
    )
    assert described["JobDetail"]["properties"]["spec"] == {"$ref": "#/components/schemas/StoredSpec"}


def test_a_spec_is_described_by_the_model_that_reads_it(document: Any) -> None:
    described = document["components"]["schemas"]["JobSpec"]["properties"]
    assert set(described) == set(JobSpec.model_fields)
    assert described["dry_ranks"]["maxItems"] == 64
    sent = document["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert sent["allOf"] == [{"$ref": "#/components/schemas/Submission"}]


# Their bodies are specs, or a part of one: thousands of cases each, which `make schemathesis` has.
LONG = {"submitJob", "searchPlans", "plan", "explainPlan", "runPrimitive"}
# Staff's alone: whoever is none gets 403 of each, and `make schemathesis` asks as staff too.
STAFFS = {
    *("calibrateHost", "drainHost", "undrainHost", "giveUpHost", "removeHost"),
    *("listJoinTokens", "makeJoinToken", "revokeJoinToken"),
    *("actOnQueue", "moveInQueue", "pauseQueue", "resumeQueue", "pausePool", "resumePool", "listAudit"),
}


EACH = 6  # of the others every sixth: the same on every day


@pytest.mark.extended
def test_what_the_server_does_is_what_it_says(postgres_site: Site, tmp_path: Path, document: Any) -> None:
    """The phase that meets every keyword of the document, of some operations; `make schemathesis` is all of it."""
    before = postgres_site.log.count("Traceback")
    operations = {one["operationId"] for path in document["paths"].values() for one in path.values()}
    some = sorted(operations - LONG - STAFFS)[::EACH]
    chosen = [part for operation in some for part in ("--include-operation-id", operation)]
    told = run_fuzz(postgres_site, tmp_path, "owner", "--phases", "examples,coverage", *chosen)
    assert told.passed, told.text
    assert told.cases >= 100
    assert postgres_site.log.count("Traceback") == before
