"""Files of another program are sent, kept, read by one request at a time and drawn, over REST and on pages."""

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

from jobs.models import ImportedTrace
from jobs.runs.traces.imports import kept
from jobs.runs.traces.imports.reading import Read, read
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


def send(client: Client, *paths: Path, part: int = 1000) -> Any:
    """As the page does; the last answer."""
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


def test_an_import_is_sent_in_parts_kept_and_drawn_for_who_may_see_it(
    people: dict[str, Client], recorded: Path, settings: Any
) -> None:
    answer = send(people["owner"], recorded / "kineto_0.json", recorded / "kineto_1.json")
    assert answer.status_code == 200, answer.content
    url = answer.json()["url"]
    made = ImportedTrace.objects.get()
    assert (made.format, made.ranks, made.steps) == ("Kineto", 2, [0])
    assert {path.name for path in kept.folder(made).iterdir()} == {"calls.parquet", "spans.parquet"}
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
    assert not kept.folder(made).exists()


def _sent_whole(client: Client, data: bytes) -> str:
    """An import that is sent and not read: its address."""
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


def test_what_is_read_is_read_by_one_request_and_not_by_another(
    people: dict[str, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two at once one found its files gone: a 500, or a 422 that deleted what the other had just read."""
    url = _sent_whole(people["owner"], TRACED)
    answers: list[Any] = []

    def meanwhile(sources: Any) -> Read:
        monkeypatch.setattr(kept, "read", read)
        answers.append(people["owner"].post(f"{url}read/"))
        answers.append(people["owner"].post(f"{url}files/0/?offset=0", b"x", content_type="application/octet-stream"))
        return read(sources)

    monkeypatch.setattr(kept, "read", meanwhile)
    first = people["owner"].post(f"{url}read/")
    assert [first.status_code, *(one.status_code for one in answers)] == [200, 409, 409]
    assert ImportedTrace.objects.get().format == "Kineto"
    assert people["owner"].get(f"{url}data/").status_code == 200


def test_what_is_deleted_while_it_is_read_or_drawn_is_gone(
    people: dict[str, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _sent_whole(people["owner"], TRACED)

    def deleted(sources: Any) -> Read:
        people["owner"].post(f"{url}delete/")
        return read(sources)

    monkeypatch.setattr(kept, "read", deleted)
    assert people["owner"].post(f"{url}read/").status_code == 409
    monkeypatch.setattr(kept, "read", read)
    url = _sent_whole(people["owner"], TRACED)
    assert people["owner"].post(f"{url}read/").status_code == 200
    (kept.folder(ImportedTrace.objects.get()) / "calls.parquet").unlink()
    assert people["owner"].get(f"{url}data/").status_code == 404


def test_few_are_read_at_once(people: dict[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """30 KB that unpack to 30 MB, read by 66 requests at once, kept everybody's pages waiting for 9 s."""
    monkeypatch.setattr(kept, "_room", threading.BoundedSemaphore(1))
    monkeypatch.setattr(kept, "PATIENCE_S", 0.01)
    first, second = (_sent_whole(people["owner"], TRACED) for _ in range(2))
    answers: list[Any] = []

    def meanwhile(sources: Any) -> Read:
        answers.append(people["owner"].post(f"{second}read/"))
        return read(sources)

    monkeypatch.setattr(kept, "read", meanwhile)
    assert people["owner"].post(f"{first}read/").status_code == 200
    assert (answers[0].status_code, "Retry-After" in answers[0]) == (503, True)
    monkeypatch.setattr(kept, "read", read)
    assert people["owner"].post(f"{second}read/").status_code == 200, "it is as it was"


def test_what_cannot_be_read_leaves_nothing_behind(people: dict[str, Client], tmp_path: Path, settings: Any) -> None:
    (tmp_path / "fr_0").write_bytes(HOSTILE["stack global"])
    answer = send(people["owner"], tmp_path / "fr_0")
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
        ({"files": [{"name": "a", "size": 2**26 + 1}]}, "Use at most 67108864."),
        ({"files": [{"name": "a", "size": 1}] * 2}, "same name"),
        ({"files": [{"name": str(n), "size": 2**26} for n in range(5)]}, "the maximum is 268,435,456."),
    ],
)
def test_a_senseless_upload_is_refused(people: dict[str, Client], body: Any, words: str) -> None:
    answer = people["owner"].post("/import/begin/", json.dumps(body), content_type="application/json")
    assert answer.status_code == 422
    assert words in answer.json()["errors"][0]["message"]
    assert not ImportedTrace.objects.exists()


def test_parts_go_on_where_the_file_ends_and_no_further(people: dict[str, Client]) -> None:
    client = people["owner"]
    files = [{"name": "a_0", "size": 10}]
    url = client.post("/import/begin/", {"files": files}, content_type="application/json").json()["url"]

    def part(query: str, data: bytes, place: int = 0) -> Any:
        return client.post(f"{url}files/{place}/{query}", data, content_type="application/octet-stream")

    assert part("?offset=0", b"12345").json() == {"size": 5}
    assert part("?offset=0", b"12345").status_code == 409
    assert part("?offset=5", b"123456").status_code == 409, "more than announced"
    assert part("?offset=x", b"1").status_code == 400
    assert part("?offset=5", b"").status_code == 413
    assert part("?offset=5", b"x" * (kept.PART_BYTES + 1)).status_code == 413
    assert part("?offset=0", b"1", place=1).status_code == 409
    assert people["stranger"].post(f"{url}files/0/?offset=5", b"1", content_type="a/b").status_code == 404
    answer = client.post(f"{url}read/")
    assert (answer.status_code, answer.json()["errors"][0]["message"]) == (
        422,
        "a_0: Only 5 of 10 bytes of the file arrived. Send the rest of the file.",
    )


def test_imports_are_bounded_and_forgotten(
    people: dict[str, Client], owner: User, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MOST_IMPORTS", 2)
    for _ in range(2):
        assert send(people["owner"], recorded / "fr_rank_0").status_code == 200
    assert send(people["owner"], recorded / "fr_rank_0").status_code == 409
    old, young = ImportedTrace.objects.order_by("pk")
    ImportedTrace.objects.filter(pk=old.pk).update(created=timezone.now() - kept.LASTS - timedelta(hours=1))
    begun = ImportedTrace.objects.create(owner=owner, name="x", size=1, files=[["a", 1]])
    ImportedTrace.objects.filter(pk=begun.pk).update(created=timezone.now() - timedelta(hours=2))
    left = kept.folder(old).parent / "leftover"
    left.mkdir()
    os.utime(left, (0, 0))
    assert kept.forget_old() == 2
    assert [made.pk for made in ImportedTrace.objects.all()] == [young.pk]
    assert {path.name for path in left.parent.iterdir()} == {young.pk}
