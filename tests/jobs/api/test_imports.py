"""Import of traces of external runs over REST."""

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


def send_part(client: APIClient, key: str, place: object, offset: object, part: bytes) -> Any:
    path = f"/api/v1/imports/{key}/files/{place}?offset={offset}"
    return client.put(path, part, content_type="application/octet-stream")


def open_import(client: APIClient, files: dict[str, bytes]) -> str:
    body = {"files": [{"name": name, "size": len(data)} for name, data in files.items()]}
    response = client.post("/api/v1/imports", body, format="json")
    assert response.status_code == 201, response.content
    return str(response.json()["id"])


def test_imports_files_in_parts(owner: User, stranger: User, api: Api) -> None:
    client, files = api(owner), {f"trace_rank{rank}.json": gpu_trace(rank) for rank in (0, 1)}
    key = open_import(client, files)
    for place, data in enumerate(files.values()):
        for offset in range(0, len(data), PART):
            part = data[offset : offset + PART]
            assert send_part(client, key, place, offset, part).json() == {"size": offset + len(part)}
    result = client.post(f"/api/v1/imports/{key}/read").json()
    assert result["format"]
    assert result["steps"]
    assert [made["id"] for made in client.get("/api/v1/imports").json()] == [key]
    trace = client.get(f"/api/v1/imports/{key}/trace", {"step": result["steps"][0], "format": "columns"}).json()
    assert trace["step"] == result["steps"][0]
    assert any(trace["calls"].values())
    for path in ("", "/trace"):
        assert api(stranger).get(f"/api/v1/imports/{key}{path}").status_code == 404
    assert api(stranger).delete(f"/api/v1/imports/{key}").status_code == 404
    assert client.post(f"/api/v1/imports/{key}/read").status_code == 409
    assert client.delete(f"/api/v1/imports/{key}").status_code == 204
    assert client.get("/api/v1/imports").json() == []


def test_appends_only_at_the_end_of_a_file(owner: User, api: Api) -> None:
    client = api(owner)
    key = open_import(client, {"a": b"0123456789"})
    for place, offset, part, status, field in (
        (0, 3, b"34", 409, "offset"),
        (0, 0, b"x" * 11, 409, "size"),
        (0, "x", b"0", 400, "offset"),
        (0, 0, b"x" * (512 * 2**10 + 1), 413, "request"),
        (1, 0, b"0", 404, "place"),
        ("a", 0, b"0", 404, "place"),
    ):
        response = send_part(client, key, place, offset, part)
        assert (response.status_code, response.json()["errors"][0]["field"]) == (status, field)
    assert (
        client.post(f"/api/v1/imports/{key}/read").json()["errors"][0]["message"]
        == "a: Only 0 of 10 bytes of the file arrived. Send the rest of the file."
    )


def test_full_disk_stores_no_partial_part(owner: User, api: Api, settings: Any, tmp_path: Path) -> None:
    client, data = api(owner), bytes(4 * PAGE_BYTES)
    with mount_full_disk(tmp_path / "disk") as disk:
        filler = disk / "filling"
        os.truncate(filler, filler.stat().st_size - 3 * PAGE_BYTES)
        settings.STATE_DIR = disk
        key = open_import(client, {"a": data})
        refused = send_part(client, key, 0, 0, data)
        os.truncate(filler, 0)
        accepted = send_part(client, key, 0, 0, data)
    assert (refused.status_code, "disk of the board is full" in refused.json()["detail"]) == (503, True)
    assert accepted.json() == {"size": len(data)}


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
def test_rejects_invalid_file_lists(owner: User, api: Api, body: Any, pointer: str) -> None:
    response = api(owner).post("/api/v1/imports", body, format="json")
    assert (response.status_code, response.json()["errors"][0]["pointer"]) == (422, pointer)
