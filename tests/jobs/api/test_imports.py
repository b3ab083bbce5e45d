"""Traces of runs from elsewhere, imported over REST."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from tests.jobs.traces.test_imports import gpu_trace
from tests.support.processes import PAGE_BYTES, mount_full_disk

Api = Callable[[User | None], APIClient]
PART = 3000


@pytest.fixture(autouse=True)
def _state(settings: Any, tmp_path: Path) -> None:
    settings.STATE_DIR = tmp_path


def put(client: APIClient, key: str, place: object, offset: object, part: bytes) -> Any:
    path = f"/api/v1/imports/{key}/files/{place}?offset={offset}"
    return client.put(path, part, content_type="application/octet-stream")


def opened(client: APIClient, files: dict[str, bytes]) -> str:
    body = {"files": [{"name": name, "size": len(data)} for name, data in files.items()]}
    answer = client.post("/api/v1/imports", body, format="json")
    assert answer.status_code == 201, answer.content
    return str(answer.json()["id"])


def test_files_are_sent_in_parts_read_and_had_as_a_trace(owner: User, stranger: User, api: Api) -> None:
    client, files = api(owner), {f"trace_rank{rank}.json": gpu_trace(rank) for rank in (0, 1)}
    key = opened(client, files)
    for place, data in enumerate(files.values()):
        for offset in range(0, len(data), PART):
            part = data[offset : offset + PART]
            assert put(client, key, place, offset, part).json() == {"size": offset + len(part)}
    told = client.post(f"/api/v1/imports/{key}/read").json()
    assert told["format"]
    assert told["steps"]
    assert [made["id"] for made in client.get("/api/v1/imports").json()] == [key]
    trace = client.get(f"/api/v1/imports/{key}/trace", {"step": told["steps"][0], "format": "columns"}).json()
    assert trace["step"] == told["steps"][0]
    assert any(trace["calls"].values())
    for path in ("", "/trace"):
        assert api(stranger).get(f"/api/v1/imports/{key}{path}").status_code == 404
    assert api(stranger).delete(f"/api/v1/imports/{key}").status_code == 404
    assert client.post(f"/api/v1/imports/{key}/read").status_code == 409
    assert client.delete(f"/api/v1/imports/{key}").status_code == 204
    assert client.get("/api/v1/imports").json() == []


def test_appends_only_at_the_end_of_a_file(owner: User, api: Api) -> None:
    client = api(owner)
    key = opened(client, {"a": b"0123456789"})
    for place, offset, part, status, field in (
        (0, 3, b"34", 409, "offset"),
        (0, 0, b"x" * 11, 409, "size"),
        (0, "x", b"0", 400, "offset"),
        (0, 0, b"x" * (512 * 2**10 + 1), 413, "request"),
        (1, 0, b"0", 404, "place"),
        ("a", 0, b"0", 404, "place"),
    ):
        answer = put(client, key, place, offset, part)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (status, field)
    assert (
        client.post(f"/api/v1/imports/{key}/read").json()["errors"][0]["message"]
        == "a: Only 0 of 10 bytes of the file arrived. Send the rest of the file."
    )


def test_on_a_full_disk_a_part_is_taken_whole_or_not_at_all(
    owner: User, api: Api, settings: Any, tmp_path: Path
) -> None:
    client, data = api(owner), bytes(4 * PAGE_BYTES)
    with mount_full_disk(tmp_path / "disk") as disk:
        filling = disk / "filling"
        os.truncate(filling, filling.stat().st_size - 3 * PAGE_BYTES)
        settings.STATE_DIR = disk
        key = opened(client, {"a": data})
        refused = put(client, key, 0, 0, data)
        os.truncate(filling, 0)
        taken = put(client, key, 0, 0, data)
    assert (refused.status_code, "disk of the board is full" in refused.json()["detail"]) == (503, True)
    assert taken.json() == {"size": len(data)}


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/files"),
        ([], ""),
        ({"files": []}, "/files"),
        ({"files": [{"name": "", "size": 1}]}, "/files/0/name"),
        ({"files": [{"size": 1}]}, "/files/0/name"),
        ({"files": [{"name": "a", "size": True}]}, "/files/0/size"),
        ({"files": [{"name": "a", "size": 1, "more": 1}]}, "/files/0/more"),
        ({"files": [{"name": "a", "size": 1}], "more": 1}, "/more"),
        ({"files": [{"name": "a", "size": 1}], "name": 7}, "/name"),
        ({"files": [{"name": "a", "size": 1}, {"name": "a", "size": 1}]}, "/files"),
    ],
)
def test_what_announces_no_files_is_422(owner: User, api: Api, body: Any, pointer: str) -> None:
    answer = api(owner).post("/api/v1/imports", body, format="json")
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)
