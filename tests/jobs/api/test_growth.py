"""The document is checked in, and within version 1 it only grows."""

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
def kept() -> Any:
    return json.loads(openapi.TARGET.read_text())


def schemas(told: Any) -> Any:
    return told["components"]["schemas"]


def test_the_document_that_is_checked_in_is_the_one_that_is_served() -> None:
    told = "a new operation, field or word: `make openapi` writes it down"
    assert openapi.TARGET.read_text() == openapi.written(get_document()), told


def parameter(told: Any, name: str) -> Any:
    return next(one for one in told["paths"][JOBS]["get"]["parameters"] if one["name"] == name)


def forget_parameter(told: Any) -> None:
    told["paths"][JOBS]["get"]["parameters"].remove(parameter(told, "tag"))


def new_parameter(told: Any) -> None:
    added = {"name": "why", "in": "query", "required": True, "schema": {"type": "string"}}
    told["paths"][JOBS]["get"]["parameters"].append(added)


def forget_media_type(told: Any) -> None:
    del told["paths"]["/api/v1/jobs/{job_id}/metrics"]["get"]["responses"]["200"]["content"]["text/csv"]


def close_plan(told: Any) -> None:
    told["paths"]["/api/v1/jobs/{job_id}/copy"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "additionalProperties"
    ] = False


BREAKS: dict[str, tuple[Change, str]] = {
    "a path": (lambda told: told["paths"].pop(f"{JOBS}/{{job_id}}/wait"), "wait: is gone"),
    "an operation": (lambda told: told["paths"][JOBS].pop("post"), "POST /api/v1/jobs: is gone"),
    "an operation's name": (lambda told: told["paths"][JOBS]["get"].update(operationId="jobs"), "to jobs"),
    "a parameter": (forget_parameter, "query tag: is gone"),
    "a parameter that must be given": (new_parameter, "why: the new parameter is required"),
    "a parameter's value": (
        lambda told: parameter(told, "archived")["schema"]["enum"].remove("too"),
        "query archived: value 'too' is no longer accepted",
    ),
    "a bound": (
        lambda told: parameter(told, "limit")["schema"].update(maximum=100),
        "limit maximum changed from 200 to 100",
    ),
    "a pattern": (lambda told: parameter(told, "q")["schema"].update(pattern="^a$"), "pattern changed from"),
    "a field of a request": (lambda told: schemas(told)["TrainSpec"]["properties"].pop("steps"), "steps: is gone"),
    "a value of a request": (
        lambda told: schemas(told)["JobSpec"]["properties"]["kind"]["enum"].remove("lab"),
        "value 'lab' is no longer accepted",
    ),
    "a type of a request": (
        lambda told: schemas(told)["TrainSpec"]["properties"]["steps"].update(type="string"),
        "type integer is no longer accepted",
    ),
    "a choice of a request": (
        lambda told: schemas(told)["JobSpec"]["properties"]["layout"]["anyOf"].pop(1),
        "choice auto is no longer accepted",
    ),
    "a field that must be sent": (
        lambda told: schemas(told)["TrainSpec"].setdefault("required", []).append("steps"),
        "steps: the field is now required",
    ),
    "a body that must be sent": (
        lambda told: told["paths"]["/api/v1/plan"]["post"]["requestBody"].update(required=True),
        "body: the body is now required",
    ),
    "further fields": (close_plan, "additional fields are no longer accepted"),
    "a field of an answer": (lambda told: schemas(told)["JobBrief"]["properties"].pop("tags"), "tags: is gone"),
    "a field that is always told": (
        lambda told: schemas(told)["JobDetail"]["required"].remove("status"),
        "status: the field is now optional",
    ),
    "a type of an answer": (
        lambda told: schemas(told)["JobBrief"]["properties"]["priority"].update(type="string"),
        "type changed from integer to string",
    ),
    "an answer": (lambda told: told["paths"][JOBS]["post"]["responses"].pop("200"), "200: this response was removed"),
    "a media type": (forget_media_type, "media type text/csv is no longer returned"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_takes_something_back_is_told(kept: Any, name: str) -> None:
    change, words = BREAKS[name]
    changed = copy.deepcopy(kept)
    change(changed)
    assert changed != kept
    broken = find_breaking_changes(kept, changed)
    assert any(words in told for told in broken), broken


def test_what_adds_something_is_fine(kept: Any) -> None:
    grown = copy.deepcopy(kept)
    grown["paths"]["/api/v1/new"] = {"get": grown["paths"][JOBS]["get"]}
    grown["paths"][JOBS]["get"]["parameters"].append({"name": "new", "in": "query", "schema": {"type": "string"}})
    grown["paths"][JOBS]["post"]["responses"]["202"] = grown["paths"][JOBS]["post"]["responses"]["200"]
    parameter(grown, "limit")["schema"]["maximum"] = 1000
    parameter(grown, "archived")["schema"]["enum"].append("no")
    schemas(grown)["JobBrief"]["properties"]["new"] = {"type": "string"}
    schemas(grown)["JobBrief"]["required"].append("new")
    schemas(grown)["TrainSpec"]["properties"]["new"] = {"type": "integer", "default": 1}
    schemas(grown)["JobBrief"]["properties"]["status"]["enum"].append("asleep")
    assert find_breaking_changes(kept, grown) == find_breaking_changes(kept, kept) == []


def test_the_command_refuses_to_take_something_back(kept: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "openapi.json"
    monkeypatch.setattr(openapi, "TARGET", file)
    promised = copy.deepcopy(kept)
    promised["paths"]["/api/v1/promised"] = promised["paths"][JOBS]
    file.write_text(json.dumps(promised))
    with pytest.raises(CommandError, match="GET /api/v1/promised: is gone"):
        call_command("openapi")
    assert json.loads(file.read_text()) == promised, "and writes nothing"
    file.unlink()
    call_command("openapi")
    assert file.read_text() == openapi.written(get_document())
