"""The stored OpenAPI document is current, and version 1 has no breaking changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from jobs.api.compatibility import find_breaking_changes
from jobs.api.openapi import get_document
from jobs.management.commands import openapi

Change = Callable[[Any], None]
JOBS = "/api/v1/jobs"


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(openapi.TARGET.read_text())


def get_schemas(document: Any) -> Any:
    return document["components"]["schemas"]


def test_stored_document_is_current() -> None:
    hint = "run `make openapi` to update the document"
    assert openapi.TARGET.read_text() == openapi.written(get_document()), hint


def find_parameter(document: Any, name: str) -> Any:
    return next(one for one in document["paths"][JOBS]["get"]["parameters"] if one["name"] == name)


def remove_parameter(document: Any) -> None:
    document["paths"][JOBS]["get"]["parameters"].remove(find_parameter(document, "tag"))


def add_required_parameter(document: Any) -> None:
    added = {"name": "why", "in": "query", "required": True, "schema": {"type": "string"}}
    document["paths"][JOBS]["get"]["parameters"].append(added)


def remove_media_type(document: Any) -> None:
    del document["paths"]["/api/v1/jobs/{job_id}/metrics"]["get"]["responses"]["200"]["content"]["text/csv"]


def forbid_additional_fields(document: Any) -> None:
    document["paths"]["/api/v1/jobs/{job_id}/copy"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "additionalProperties"
    ] = False


BREAKS: dict[str, tuple[Change, str]] = {
    "a path": (lambda document: document["paths"].pop(f"{JOBS}/{{job_id}}/wait"), "wait: is gone"),
    "an operation": (lambda document: document["paths"][JOBS].pop("post"), "POST /api/v1/jobs: is gone"),
    "an operation's name": (lambda document: document["paths"][JOBS]["get"].update(operationId="jobs"), "to jobs"),
    "a parameter": (remove_parameter, "query tag: is gone"),
    "a parameter that must be given": (add_required_parameter, "why: the new parameter is required"),
    "a parameter's value": (
        lambda document: find_parameter(document, "archived")["schema"]["enum"].remove("too"),
        "query archived: value 'too' is no longer accepted",
    ),
    "a bound": (
        lambda document: find_parameter(document, "limit")["schema"].update(maximum=100),
        "limit maximum changed from 200 to 100",
    ),
    "a pattern": (
        lambda document: find_parameter(document, "q")["schema"].update(pattern="^a$"),
        "pattern changed from",
    ),
    "a field of a request": (
        lambda document: get_schemas(document)["TrainSpec"]["properties"].pop("steps"),
        "steps: is gone",
    ),
    "a value of a request": (
        lambda document: get_schemas(document)["JobSpec"]["properties"]["kind"]["enum"].remove("lab"),
        "value 'lab' is no longer accepted",
    ),
    "a type of a request": (
        lambda document: get_schemas(document)["TrainSpec"]["properties"]["steps"].update(type="string"),
        "type integer is no longer accepted",
    ),
    "a choice of a request": (
        lambda document: get_schemas(document)["JobSpec"]["properties"]["layout"]["anyOf"].pop(1),
        "choice auto is no longer accepted",
    ),
    "a field that must be sent": (
        lambda document: get_schemas(document)["TrainSpec"].setdefault("required", []).append("steps"),
        "steps: the field is now required",
    ),
    "a body that must be sent": (
        lambda document: document["paths"]["/api/v1/plan"]["post"]["requestBody"].update(required=True),
        "body: the body is now required",
    ),
    "further fields": (forbid_additional_fields, "additional fields are no longer accepted"),
    "a field of an answer": (
        lambda document: get_schemas(document)["JobBrief"]["properties"].pop("tags"),
        "tags: is gone",
    ),
    "a required field of an answer": (
        lambda document: get_schemas(document)["JobDetail"]["required"].remove("status"),
        "status: the field is now optional",
    ),
    "a type of an answer": (
        lambda document: get_schemas(document)["JobBrief"]["properties"]["priority"].update(type="string"),
        "type changed from integer to string",
    ),
    "an answer": (
        lambda document: document["paths"][JOBS]["post"]["responses"].pop("200"),
        "200: this response was removed",
    ),
    "a media type": (remove_media_type, "media type text/csv is no longer returned"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_finds_breaking_changes(document: Any, name: str) -> None:
    change, message = BREAKS[name]
    changed = copy.deepcopy(document)
    change(changed)
    assert changed != document
    changes = find_breaking_changes(document, changed)
    assert any(message in change_text for change_text in changes), changes


def test_accepts_additions(document: Any) -> None:
    extended = copy.deepcopy(document)
    extended["paths"]["/api/v1/new"] = {"get": extended["paths"][JOBS]["get"]}
    extended["paths"][JOBS]["get"]["parameters"].append({"name": "new", "in": "query", "schema": {"type": "string"}})
    extended["paths"][JOBS]["post"]["responses"]["202"] = extended["paths"][JOBS]["post"]["responses"]["200"]
    find_parameter(extended, "limit")["schema"]["maximum"] = 1000
    find_parameter(extended, "archived")["schema"]["enum"].append("no")
    get_schemas(extended)["JobBrief"]["properties"]["new"] = {"type": "string"}
    get_schemas(extended)["JobBrief"]["required"].append("new")
    get_schemas(extended)["TrainSpec"]["properties"]["new"] = {"type": "integer", "default": 1}
    get_schemas(extended)["JobBrief"]["properties"]["status"]["enum"].append("asleep")
    assert find_breaking_changes(document, extended) == find_breaking_changes(document, document) == []


def test_command_rejects_breaking_changes(document: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "openapi.json"
    monkeypatch.setattr(openapi, "TARGET", file)
    newer = copy.deepcopy(document)
    newer["paths"]["/api/v1/promised"] = newer["paths"][JOBS]
    file.write_text(json.dumps(newer))
    with pytest.raises(CommandError, match="GET /api/v1/promised: is gone"):
        call_command("openapi")
    assert json.loads(file.read_text()) == newer, "the file is unchanged"
    file.unlink()
    call_command("openapi")
    assert file.read_text() == openapi.written(get_document())
