"""Check attacks 12 to 17, 20 to 25, and 33: malicious requests.

The tests run against a served board. docs/explanation/security.md lists the attacks.
"""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.conftest import BROKEN, session
from tests.planner.wrong_specs import GOOD
from tests.support.web import Site
from webapp.serving import limits

SECRET = "the-key-of-this-installation"
UP = ["../", "%2e%2e/", "%252e%252e/", "..%2f", "..%5c", "..\\", "....//", "/", "%2f"]


@pytest.fixture(scope="module")
def job(served: Site) -> str:
    state = Path(served.environment["MESHBOARD_STATE_DIR"])
    for place in (state, state.parent, state / "history"):
        place.mkdir(exist_ok=True)
        (place / "secret").write_text(SECRET)
    return served.submit_job(GOOD)


def build_script_spec(**script: Any) -> dict[str, Any]:
    return {"name": "script", "kind": "script", "script": {"path": "train.py", **script}}


@pytest.mark.parametrize("up", UP)
@pytest.mark.parametrize(
    "base",
    [
        "/static/",
        "/api/v1/jobs/{id}/history/",
        "/api/v1/jobs/{id}/logs/",
        "/jobs/{id}/history/",
        "/import/",
        "/api/v1/hosts/x/",
    ],
)
def test_12_path_does_not_leave_its_folder(served: Site, job: str, base: str, up: str) -> None:
    end = "" if base.startswith(("/api/", "/static/")) else "/"  # a request without the slash is redirected
    for target in (f"{up * 3}secret{end}", f"{up * 6}etc/passwd{end}", f"{up}secret%00.txt{end}"):
        head = f"GET {base.format(id=job)}{target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        who = [
            f"Authorization: {served.build_token_header('owner')['Authorization']}",
            f"Cookie: {served.build_cookie_header('owner')['Cookie']}",
        ]
        answer = served.send_raw((head + "\r\n".join(who) + "\r\n\r\n").encode())
        status = int(answer.split()[1])
        assert status in (400, 404, 405, 422), (target, answer[:200])
        assert SECRET.encode() not in answer
        assert b"root:" not in answer


@pytest.mark.parametrize("argument", ["; id", "$(id)", "`id`", "a\nb", "| sh", "--rdzv-endpoint=evil:1", "-m"])
def test_14_arguments_are_stored_unchanged(served: Site, argument: str) -> None:
    """tests/workers/host/test_programs.py shows that the script receives them, and torchrun never does."""
    job = served.submit_job(build_script_spec(args=["--lr", argument]))
    stored = served.call("GET", f"/api/v1/jobs/{job}", headers=served.build_token_header("owner")).json()
    assert stored["spec"]["script"]["args"] == ["--lr", argument]


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ({"path": "../train.py"}, "script.path"),
        ({"path": "/etc/passwd"}, "script.path"),
        ({"path": "a/../../b.py"}, "script.path"),
        ({"path": None, "module": "-m"}, "script.module"),
        ({"path": None, "module": "--rdzv-endpoint=x"}, "script.module"),
        ({"cwd": "/"}, "script.cwd"),
        ({"cwd": ".."}, "script.cwd"),
        *(({"environment": {name: "x"}}, "script.environment") for name in ("LD_PRELOAD", "PYTHONPATH", "PET_NNODES")),
        ({"env": {"PATH": "x"}}, "script.env"),
    ],
)
def test_15_to_17_paths_and_variables_for_torchrun_or_the_loader_return_422(
    served: Site, script: Any, field: str
) -> None:
    answer = served.call(
        "POST", "/api/v1/jobs", build_script_spec(**script), headers=served.build_token_header("staff")
    )
    assert answer.status == 422, answer.body
    assert field in {error["field"] for error in answer.json()["errors"]}, answer.body


def test_20_name_with_markup_is_escaped(served: Site) -> None:
    name = "<img src=x onerror=alert(1)></script>"
    job = served.submit_job({**GOOD, "name": name})
    for path, who in (("/", "owner"), (f"/jobs/{job}/", "owner"), ("/overview/", "owner"), ("/queue/", "staff")):
        answer = served.call("GET", path, headers=served.build_cookie_header(who))
        assert answer.status == 200
        assert b"<img src=x" not in answer.body
        policy = answer.headers["Content-Security-Policy"]
        assert "script-src 'self';" in f"{policy};"
        assert "unsafe" not in policy


@pytest.mark.parametrize("value", ["0", "-1", "1e9", "NaN", "Infinity", "-Infinity", "1" + "0" * 20, "true", '"4"'])
def test_22_invalid_degree_returns_422(served: Site, value: str) -> None:
    body = json.dumps({**GOOD, "layout": {"dp": "HERE"}}).replace('"HERE"', value).encode()
    answer = served.call("POST", "/api/v1/jobs", body, headers=served.build_token_header("staff"))
    assert answer.status == 422, answer.body
    assert "layout.dp" in {error["field"] for error in answer.json()["errors"]}


def test_22_degrees_that_do_not_divide_the_model_return_422(served: Site) -> None:
    wrong = {**GOOD, "layout": {"dp": 3, "tp": 3}}
    answer = served.call("POST", "/api/v1/jobs", wrong, headers=served.build_token_header("staff"))
    assert answer.status == 422
    assert any("3" in error["message"] for error in answer.json()["errors"])


def test_24_large_body_returns_413_and_leaves_no_file(served: Site) -> None:
    before = list_board_files(served)
    head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 104857600\r\nExpect: 100-continue\r\n\r\n"
    assert served.send_raw(head).startswith(b"HTTP/1.1 413")
    body = b" " * (limits.MAX_BODY_BYTES + 1)
    for path in (
        "/api/v1/jobs",
        "/api/v1/runs/x/1/members/0/batches",
        "/api/v1/hosts/join",
        "/login/",
        "/import/begin/",
    ):
        assert served.call("POST", path, body).status == 413
    assert list_board_files(served) == before


def list_board_files(served: Site) -> set[str]:
    """Return the files of the board and of the folders above it, except files that always change."""
    state = Path(served.environment["MESHBOARD_STATE_DIR"])
    found = [path for folder in (state, state.parent, state.parent.parent) for path in folder.glob("**/*")]
    changing = ("board.sqlite3", "temp-", "dump")
    return {str(path) for path in found if path.is_file() and not path.name.startswith(changing)}


def build_gzip_bomb() -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as out:
        for _ in range(260):
            out.write(bytes(2**20))
    return packed.getvalue()


def build_path_traversal_zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as out:
        for name in ("../../evil", "/tmp/evil", "..\\evil"):
            out.writestr(name, "x")
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "make"),
    [("../../evil.json.gz", build_gzip_bomb), ("/tmp/evil.zip", build_path_traversal_zip)],
    ids=["bomb", "slip"],
)
def test_25_gzip_bomb_or_path_traversal_returns_422_and_leaves_the_disk_unchanged(
    served: Site, name: str, make: Any
) -> None:
    before, memory, sent = list_board_files(served), served.memory_bytes, make()
    who = session(served, "owner")
    begun = served.call("POST", "/import/begin/", {"files": [{"name": name, "size": len(sent)}]}, headers=who)
    assert begun.status == 201, begun.body
    address = begun.json()["url"]
    who["Content-Type"] = "application/octet-stream"
    for offset in range(0, len(sent), 2**19):
        part = sent[offset : offset + 2**19]
        assert served.call("POST", f"{address}files/0/?offset={offset}", part, headers=who).status == 200
    answer = served.call("POST", f"{address}read/", b"", headers=who)
    assert answer.status == 422, answer.body
    assert list_board_files(served) - before == set()
    assert served.memory_bytes - memory < 128 * 2**20


def test_33_failure_reveals_only_an_id(served: Site) -> None:
    """Insert a row that no code of the board writes."""
    broken = served.submit_job({**GOOD, "name": "broken on purpose"})
    with sqlite3.connect(served.database_url.removeprefix("sqlite:///")) as board:
        board.execute("UPDATE jobs_job SET spec = '\"broken on purpose\"' WHERE id = ?", [broken])
    try:
        for path, who in (
            (f"/api/v1/jobs/{broken}", served.build_token_header("owner")),
            (f"/jobs/{broken}/", served.build_cookie_header("owner")),
        ):
            answer = served.call("GET", path, headers=who)
            assert answer.status == 500
            reference = answer.headers["X-Request-ID"]
            BROKEN.add(reference)
            assert reference in answer.body.decode(), "a user can quote it in a report"
            entries = [json.loads(line) for line in served.log.splitlines() if reference in line]
            assert any("Traceback" in line.get("exc_info", "") for line in entries), (
                "and the log has all of it under it"
            )
            for inner in ("Traceback", "TypeError", "present.py", "sqlite", served.environment["MESHBOARD_SECRET_KEY"]):
                assert inner.encode() not in answer.body
    finally:
        with sqlite3.connect(served.database_url.removeprefix("sqlite:///")) as board:
            board.execute("DELETE FROM jobs_job WHERE id = ?", [broken])
