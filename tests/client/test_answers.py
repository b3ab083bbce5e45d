"""The client's types are what the OpenAPI document says, and its methods are of the operations that they ask."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, get_args, get_origin, get_type_hints

import pytest

from manual import client_types as made
from meshboard import Client, answers
from meshboard.client import Job

DOCUMENT = json.loads(made.DOCUMENT.read_text())
RETURNS: dict[str, Callable[..., Any]] = {
    "getResults": Client.results,
    "adviseJob": Client.advice,
    "compareJobs": Client.compare,
    "plan": Client.plan,
    "importModel": Client.import_model,
    "importLayout": Client.import_layout,
    "searchPlans": Client.search,
    "getBaseline": Client.baseline,
    "setBaseline": Client.set_baseline,
    "listBaselines": Client.baselines,
    "listCheckpoints": Client.checkpoints,
    "listJobs": Client.jobs,
    "listAudit": Client.audit,
}


def get_schema(operation: str) -> Any:
    """Return the return types of the methods."""
    every = (data for methods in DOCUMENT["paths"].values() for data in methods.values())
    (data,) = [one for one in every if one["operationId"] == operation]
    return data["responses"]["200"]["content"]["application/json"]["schema"]


def test_types_match_the_openapi_document(tmp_path: Path) -> None:
    made.write_package(tmp_path)
    stored, data = ({file.name: file.read_text() for file in place.glob("*.py")} for place in (made.TARGET, tmp_path))
    assert stored.keys() == data.keys(), "run `make openapi`"
    assert [name for name in data if data[name] != stored[name]] == [], "run `make openapi`"


@pytest.mark.parametrize("operation", RETURNS)
def test_method_returns_the_type_of_its_operation(operation: str) -> None:
    schema, returned = get_schema(operation), get_type_hints(RETURNS[operation])["return"]
    if schema.get("type") == "array":
        (returned,), schema = get_args(returned), schema["items"]
    assert (returned.__name__, returned) == (schema["$ref"].rpartition("/")[2], getattr(answers, returned.__name__))


def test_methods_return_typed_json() -> None:
    vague = {name: str(hint) for name, hint in _returned().items() if "dict[" in str(hint)}
    assert vague == {"table": "dict[str, list[typing.Any]]"}, "columns by name: whatever the table has"
    assert get_type_hints(Job)["detail"] is answers.JobDetail


def _returned() -> dict[str, Any]:
    methods = inspect.getmembers(Client, inspect.isfunction)
    return {name: get_type_hints(method).get("return") for name, method in methods if not name.startswith("_")}


def test_types_distinguish_nullable_from_optional_fields() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for name in answers.__all__:
        schema, hints = schemas[name], get_type_hints(getattr(answers, name), include_extras=True)
        optional = {field for field, hint in hints.items() if get_origin(hint) is NotRequired}
        assert (name, hints.keys()) == (name, schema["properties"].keys())
        assert (name, hints.keys() - optional) == (name, {*schema.get("required", ())})
        nullable = {field for field, data in schema["properties"].items() if {"type": "null"} in data.get("anyOf", ())}
        assert (name, nullable) == (name, {field for field, hint in hints.items() if type(None) in _choices(hint)})


def _choices(hint: Any) -> tuple[Any, ...]:
    return _choices(get_args(hint)[0]) if get_origin(hint) is NotRequired else get_args(hint)
