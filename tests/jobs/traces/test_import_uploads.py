"""Upload, read, and show imported traces over REST and on pages."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from jobs.core.received_files import MAX_PART_BYTES
from jobs.models import ImportedTrace
from jobs.runs.traces.imports import store
from jobs.runs.traces.imports.reader_process import ReadSummary, read_in_process
from jobs.runs.traces.imports.trace_files import TraceFile
from tests.jobs.traces.flight_recorder_cases import analyze, make_cases
from tests.jobs.traces.hostile import HOSTILE


@pytest.fixture
def people(owner: User, stranger: User, viewer: User, settings: Any, tmp_path: Path) -> dict[str, Client]:
    settings.STATE_DIR = tmp_path / "state"
    found = {}
    for user in (owner, stranger, viewer):
        client = Client()
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        found[user.username] = client
    return found


def upload(client: Client, *paths: Path, part: int = 1000) -> Any:
    """Upload files as the page does. Return the last response."""
    files = [{"name": path.name, "size": path.stat().st_size} for path in paths]
    answer = client.post("/import/begin/", {"name": "a run", "files": files}, content_type="application/json")
    if answer.status_code != 201:
        return answer
    url = answer.json()["url"]
    for place, path in enumerate(paths):
        data = path.read_bytes()
        for offset in range(0, len(data), part):
            told = {"content_type": "application/octet-stream"}
            answer = client.post(f"{url}files/{place}/?offset={offset}", data[offset : offset + part], **told)
            assert answer.status_code == 200, answer.content
    return client.post(f"{url}read/")


def test_uploads_reads_and_shows_an_import(people: dict[str, Client], trace_folder: Path, settings: Any) -> None:
    answer = upload(people["owner"], trace_folder / "kineto_0.json", trace_folder / "kineto_1.json")
    assert answer.status_code == 200, answer.content
    url = answer.json()["url"]
    made = ImportedTrace.objects.get()
    assert (made.format, made.ranks, made.steps) == ("Kineto", 2, [0])
    assert {path.name for path in store.get_folder(made).iterdir()} == {"calls.parquet", "spans.parquet"}
    assert "Kineto · 2 ranks" in people["owner"].get(url).content.decode()
    told = people["owner"].get(f"{url}data/").json()
    assert len(told["calls"]["columns"]["op"]) == 18
    assert people["owner"].get(f"{url}data/", {"format": "chrome"}).json()["traceEvents"]
    assert people["owner"].get(f"{url}data/", {"step": 5}).status_code == 404
    for path in (url, f"{url}data/", f"{url}delete/"):
        assert people["stranger"].get(path).status_code == 404
        assert Client().get(path).status_code == 302
    assert people["viewer"].get(url).status_code == 200, "staff may look"
    assert people["viewer"].post(f"{url}delete/").status_code == 404, "and not delete"
    assert url in people["owner"].get("/import/").content.decode()
    assert "/import/i" not in people["stranger"].get("/import/").content.decode()
    assert b"Delete import " in people["owner"].get(f"{url}delete/").content
    assert ImportedTrace.objects.exists(), "asking deletes nothing"
    people["owner"].post(f"{url}delete/")
    assert not ImportedTrace.objects.exists()
    assert not store.get_folder(made).exists()


def test_shows_hang_of_flight_recorder_dumps(people: dict[str, Client], tmp_path: Path) -> None:
    (case,) = (case for case in make_cases() if case.name == "missing rank")
    analyze(case.dumps, tmp_path)
    answer = upload(people["owner"], *sorted(tmp_path.glob("rank_*")))
    page = people["owner"].get(answer.json()["url"]).content.decode()
    assert "Stalled: ranks 0, 1 and 3 wait for rank 2, which did not enter all_reduce 3 on world" in page
    assert "in all_reduce of 64 float32 (call 3 on world), at train.py:30 in train_step" in page
    (listed,) = people["owner"].get("/api/v1/imports").json()
    assert listed["findings"][0]["state"] == "hung"


def _upload(client: Client, data: bytes) -> str:
    """Upload a file of an import, and return its URL."""
    files = [{"name": "k0.json", "size": len(data)}]
    url: str = client.post("/import/begin/", {"files": files}, content_type="application/json").json()["url"]
    assert client.post(f"{url}files/0/?offset=0", data, content_type="application/octet-stream").status_code == 200
    return url


TRACED = json.dumps(
    {
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "ts": 1.0, "dur": 5.0}
        ]
    }
).encode()


def test_only_one_request_reads_an_import(people: dict[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request found its files gone: it failed, or deleted the import."""
    url = _upload(people["owner"], TRACED)
    answers: list[Any] = []

    def read_while_another_reads(files: list[TraceFile], folder: Path) -> ReadSummary:
        monkeypatch.setattr(store, "read_in_process", read_in_process)
        answers.append(people["owner"].post(f"{url}read/"))
        answers.append(people["owner"].post(f"{url}files/0/?offset=0", b"x", content_type="application/octet-stream"))
        return read_in_process(files, folder)

    monkeypatch.setattr(store, "read_in_process", read_while_another_reads)
    first = people["owner"].post(f"{url}read/")
    assert [first.status_code, *(one.status_code for one in answers)] == [200, 409, 409]
    assert ImportedTrace.objects.get().format == "Kineto"
    assert people["owner"].get(f"{url}data/").status_code == 200


def test_import_deleted_during_read_is_gone(people: dict[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    url = _upload(people["owner"], TRACED)

    def delete_while_reading(files: list[TraceFile], folder: Path) -> ReadSummary:
        people["owner"].post(f"{url}delete/")
        return read_in_process(files, folder)

    monkeypatch.setattr(store, "read_in_process", delete_while_reading)
    assert people["owner"].post(f"{url}read/").status_code == 409
    monkeypatch.setattr(store, "read_in_process", read_in_process)
    url = _upload(people["owner"], TRACED)
    assert people["owner"].post(f"{url}read/").status_code == 200
    (store.get_folder(ImportedTrace.objects.get()) / "calls.parquet").unlink()
    assert people["owner"].get(f"{url}data/").status_code == 404


def test_shows_how_far_the_board_has_read(people: dict[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    url = _upload(people["owner"], TRACED)
    found: list[Any] = []

    def read_while_user_looks(files: list[TraceFile], folder: Path) -> ReadSummary:
        (folder / "progress").write_text("0.425")
        found.append(people["owner"].get(f"{url}progress/").json())
        found.append(b"Reading k0.json\xe2\x80\xa6 42% read." in people["owner"].get("/import/").content)
        found.append(people["stranger"].get(f"{url}progress/").status_code)
        return read_in_process(files, folder)

    monkeypatch.setattr(store, "read_in_process", read_while_user_looks)
    assert people["owner"].get(f"{url}progress/").json() == {"read": None}
    assert people["owner"].post(f"{url}read/").status_code == 200
    assert found == [{"read": 0.425}, True, 404]
    assert people["owner"].get(f"{url}progress/").json() == {"read": None}


def test_limits_concurrent_reads(people: dict[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """66 concurrent reads of a file of 30 KB that decompresses to 30 MB blocked pages for 9 s."""
    monkeypatch.setattr(store, "_read_slots", threading.BoundedSemaphore(1))
    monkeypatch.setattr(store, "READ_SLOT_TIMEOUT_S", 0.01)
    first, second = (_upload(people["owner"], TRACED) for _ in range(2))
    answers: list[Any] = []

    def read_while_another_reads(files: list[TraceFile], folder: Path) -> ReadSummary:
        answers.append(people["owner"].post(f"{second}read/"))
        return read_in_process(files, folder)

    monkeypatch.setattr(store, "read_in_process", read_while_another_reads)
    assert people["owner"].post(f"{first}read/").status_code == 200
    assert (answers[0].status_code, "Retry-After" in answers[0]) == (503, True)
    monkeypatch.setattr(store, "read_in_process", read_in_process)
    assert people["owner"].post(f"{second}read/").status_code == 200, "the import is unchanged"


def test_invalid_import_is_deleted(people: dict[str, Client], tmp_path: Path, settings: Any) -> None:
    (tmp_path / "fr_0").write_bytes(HOSTILE["stack global"])
    answer = upload(people["owner"], tmp_path / "fr_0")
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "pickle"
    assert error["message"].startswith("fr_0: Byte 14 is the opcode STACK_GLOBAL")
    assert not ImportedTrace.objects.exists()
    assert list((settings.STATE_DIR / "imports").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "Send a JSON object."),
        ({"files": []}, "is an empty list. Use a list of 1 or more entries."),
        ({"files": [7]}, "is 7. Use an object."),
        ({"files": [{"name": "a\x00", "size": 1}]}, "Remove NUL and other control characters."),
        ({"files": [{"name": "a", "size": 0}]}, "is 0. Use at least 1."),
        ({"files": [{"name": "a", "size": 2**28 + 1}]}, "Use at most 268435456."),
        ({"files": [{"name": "a", "size": 1}] * 2}, "same name"),
        ({"files": [{"name": str(n), "size": 2**28} for n in range(5)]}, "the maximum is 536,870,912."),
    ],
)
def test_rejects_invalid_upload(people: dict[str, Client], body: Any, words: str) -> None:
    answer = people["owner"].post("/import/begin/", json.dumps(body), content_type="application/json")
    assert answer.status_code == 422
    assert words in answer.json()["errors"][0]["message"]
    assert not ImportedTrace.objects.exists()


def test_appends_only_at_the_end_of_a_file(people: dict[str, Client]) -> None:
    client = people["owner"]
    files = [{"name": "a_0", "size": 10}]
    url = client.post("/import/begin/", {"files": files}, content_type="application/json").json()["url"]

    def part(query: str, data: bytes, place: int = 0) -> Any:
        return client.post(f"{url}files/{place}/{query}", data, content_type="application/octet-stream")

    assert part("?offset=0", b"12345").json() == {"size": 5}
    assert part("?offset=0", b"12345").json() == {"size": 5}, "its response was lost"
    assert part("?offset=0", b"1234x").status_code == 409
    assert part("?offset=5", b"123456").status_code == 409, "more than announced"
    assert part("?offset=x", b"1").status_code == 400
    assert part("?offset=5", b"").status_code == 413
    assert part("?offset=5", b"x" * (MAX_PART_BYTES + 1)).status_code == 413
    assert part("?offset=0", b"1", place=1).status_code == 409
    assert people["stranger"].post(f"{url}files/0/?offset=5", b"1", content_type="a/b").status_code == 404
    answer = client.post(f"{url}read/")
    assert (answer.status_code, answer.json()["errors"][0]["message"]) == (
        422,
        "a_0: Only 5 of 10 bytes of the file arrived. Send the rest of the file.",
    )


def test_limits_and_expires_imports(
    people: dict[str, Client], owner: User, trace_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_IMPORTS_PER_USER", 2)
    for _ in range(2):
        assert upload(people["owner"], trace_folder / "fr_rank_0").status_code == 200
    assert upload(people["owner"], trace_folder / "fr_rank_0").status_code == 409
    old, young = ImportedTrace.objects.order_by("pk")
    ImportedTrace.objects.filter(pk=old.pk).update(created=timezone.now() - store.IMPORT_LIFETIME - timedelta(hours=1))
    begun = ImportedTrace.objects.create(owner=owner, name="x", size=1, files=[["a", 1]])
    ImportedTrace.objects.filter(pk=begun.pk).update(created=timezone.now() - timedelta(hours=2))
    left = store.get_folder(old).parent / "leftover"
    left.mkdir()
    os.utime(left, (0, 0))
    assert store.delete_expired() == 2
    assert [made.pk for made in ImportedTrace.objects.all()] == [young.pk]
    assert {path.name for path in left.parent.iterdir()} == {young.pk}
