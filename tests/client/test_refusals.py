"""Requests that the client rejects, and errors for builds."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from meshboard import AwayError, Client
from meshboard.commands.app import ExitCode
from meshboard.commands.app import connect as opened
from meshboard.errors import WrongError
from tests.client.conftest import FakeServer, Ran, answer
from tests.client.test_api import ENDED, JOB
from tests.support.web import create_certificate

Meshboard = Callable[..., Ran]
PAGE = (200, {"Content-Type": "text/html"}, b"<html><body>Back at noon</body></html>")
METHODS = {name: method for name, method in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
IN_PATHS = {"job_id", "project", "branch", "table"}  # parameters that are a part of an address
NOT_NAMES = ["..", ".", "", "../members/as2", "x/../../y", "a/"]


def inputs(method: Any, name: str) -> dict[str, Any]:
    """Arguments of a call, each word of which is `name`."""
    of_type = {"str": name, "int": 1, "Sequence[str]": [name], "Spec": {}, "SearchRequest | dict[str, Any]": {}}
    of_type |= {"dict[str, Any]": {}, "bytes": b"x"}
    parameters = list(inspect.signature(method).parameters.values())[1:]
    needed = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    return {one.name: of_type[str(one.annotation)] for one in needed}


def called(board: Client, method: str, arguments: dict[str, Any]) -> None:
    found = getattr(board, method)(**arguments)
    if isinstance(found, Iterator):
        next(found, None)


@pytest.mark.parametrize("name", NOT_NAMES)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_requests_only_the_named_object(server: FakeServer, board: Client, method: str, name: str) -> None:
    """Every public method, those too that will be added; a slash is refused but in a branch, where it makes two."""
    arguments = inputs(METHODS[method], name)
    if not IN_PATHS & arguments.keys():
        server.respond((200, {**JOB, "jobs": [], "sha256": "0" * 64}))
        called(board, method, arguments)
        assert all(".." not in unquote(urlsplit(one.split()[1]).path).split("/") for one in server.requests)
        return
    with pytest.raises(WrongError, match="A name cannot be empty"):
        called(board, method, arguments)
    assert server.requests == []


def test_encodes_names_in_addresses(server: FakeServer, board: Client) -> None:
    server.respond((200, {"runs": []}))
    board.baseline("alpha", "feature/x y?#%2e%2e")
    assert server.requests == ["GET /api/v1/projects/alpha/baselines/feature/x%20y%3F%23%252e%252e"]


@pytest.mark.parametrize(
    "words",
    [
        ("baseline", "rm", "../members/as2", "--project", "alpha"),
        ("baseline", "set", "../../x", "j"),
        ("baseline", "show", "main", "--project", "../.."),
        ("status", "RUN/advice", "--json"),
        ("cancel", "../.."),
        ("logs", ""),
    ],
)
def test_sends_nothing_for_an_invalid_name(meshboard: Meshboard, server: FakeServer, words: tuple[str, ...]) -> None:
    ran = meshboard(*words, at=server)
    assert (ran.code, server.requests, "A name cannot be empty" in ran.err) == (ExitCode.WRONG, [], True)


@pytest.mark.parametrize("words", [("status", "j"), ("logs", "j"), ("logs", "j", "-f"), ("watch", "j"), ("status",)])
def test_rejects_a_page_as_a_response(meshboard: Meshboard, server: FakeServer, words: tuple[str, ...]) -> None:
    server.answers = [PAGE]
    ran = meshboard(*words, at=server)
    assert (ran.code, ran.out) == (ExitCode.AWAY, "")
    assert "returned a page instead of the REST API" in ran.err
    assert "Back at noon" in ran.err
    assert ran.err.count("\n") == 1


def test_rejects_a_page_as_an_event_stream(server: FakeServer, board: Client) -> None:
    server.answers = [PAGE]
    with pytest.raises(AwayError, match="a page"):
        next(board.events("j"))


def test_rejects_json_of_another_service(meshboard: Meshboard, server: FakeServer) -> None:
    server.respond((200, {"ok": True}))
    for words in (("status",), ("status", "j")):
        ran = meshboard(*words, at=server)
        assert (ran.code, "Check the address of the board." in ran.err) == (ExitCode.AWAY, True)


def test_wait_continues_after_a_page_of_a_proxy(meshboard: Meshboard, server: FakeServer, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: n")
    reached = answer(200, {"reached": True, "job": ENDED})
    server.answers = [answer(201, JOB), PAGE, answer(200, JOB), PAGE, reached]
    ran = meshboard("submit", str(spec), "--wait", at=server)
    assert (ran.code, ran.out) == (0, "j\n")


@pytest.mark.parametrize(
    ("key", "words"), [("", "--key is empty"), ("ü", "--key 'ü': "), ("k" * 201, "1 to 200 visible")]
)
@pytest.mark.parametrize("runs", ["1", "2"])
def test_queues_nothing_with_an_invalid_key(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, key: str, words: str, runs: str
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: n")
    ran = meshboard("submit", str(spec), "--key", key, "--runs", runs, at=server)
    assert (ran.code, ran.out, server.requests) == (ExitCode.WRONG, "", [])
    assert words in ran.err
    with pytest.raises(WrongError):
        Client(server.url, "t").submit({}, key=key)


@pytest.mark.parametrize("spec", [{"a": math.nan}, {"a": "\ud800"}])
def test_sends_no_value_that_http_cannot_carry(server: FakeServer, board: Client, spec: dict[str, Any]) -> None:
    with pytest.raises(WrongError, match="Cannot send"):
        board.submit(spec)
    assert server.requests == []


def test_prints_a_problem_document_with_json(meshboard: Meshboard, server: FakeServer) -> None:
    error = {"field": "layout.tp", "pointer": "/layout/tp", "in": "body", "message": "4 = 3 + 1"}
    problem = {"type": "/docs/errors/#senseless", "title": "T", "status": 422, "detail": "d", "errors": [error]}
    server.respond((422, problem))
    ran = meshboard("status", "j", "--json", at=server)
    assert (ran.code, json.loads(ran.out), ran.err) == (2, problem, "meshboard: layout.tp: 4 = 3 + 1\n")
    assert meshboard("status", "j", at=server).out == ""


@pytest.mark.parametrize(
    ("words", "code", "field"),
    [
        (("status", "..", "--json"), 2, "request"),
        (("status", "j", "--json"), 3, "request"),
        (("status", "--limit", "x", "--json"), 2, "request"),
        (("submit", "/nowhere", "--json"), 2, "request"),
        (("submit", "-", "--json"), 2, "train.lr"),
        (("gate", "j", "--json"), 2, "request"),
    ],
)
def test_client_errors_are_problem_documents(
    meshboard: Meshboard,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
    field: str,
) -> None:
    server.answers = [PAGE]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"train: {lr: !lr 1}")))
    ran = meshboard(*words, at=server)
    content = json.loads(ran.out)
    assert (ran.code, content["status"], content["errors"][0]["field"]) == (code, None, field)
    assert content["title"]
    assert content["detail"] == content["errors"][0]["message"]
    assert content["detail"] in ran.err


def test_prints_queued_jobs_after_an_interrupted_wait(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: n")
    submit = ("submit", str(spec), "--wait", "--json")
    server.respond_at("jobs", {**JOB, "status": "queued"}, 201)
    server.respond_at("jobs/j", JOB)
    server.respond_at("jobs/j/wait", {"reached": False, "job": JOB})
    ran = meshboard(*submit, "--timeout", "0", at=server)
    assert (ran.code, json.loads(ran.out)["status"]) == (ExitCode.LATE, "running"), "as it was seen last"
    assert json.loads(meshboard("wait", "j", "--timeout", "0", "--json", at=server).out)["id"] == "j"
    server.respond_at("jobs/j", {"errors": [{"field": "request", "message": "the token was revoked"}]}, 401)
    ran = meshboard(*submit, at=server)
    assert (ran.code, json.loads(ran.out)["id"], "revoked" in ran.err) == (ExitCode.AWAY, "j", True)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait", stop)
    ran = meshboard(*submit, at=server)
    assert (ran.code, json.loads(ran.out)["id"]) == (ExitCode.INTERRUPTED, "j")
    monkeypatch.setattr(Client, "wait", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    ran = meshboard(*submit, at=server)
    assert (ran.code, json.loads(ran.out)["id"]) == (ExitCode.TERMINATED, "j"), "a build that is cancelled"
    signal.signal(signal.SIGTERM, before)


def test_prints_queued_jobs_if_a_later_submit_is_refused(
    meshboard: Meshboard, server: FakeServer, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: n")
    server.respond((201, JOB), (422, {"errors": [{"field": "quota", "message": "2 = 1 + 1"}]}))
    ran = meshboard("submit", str(spec), "--runs", "2", "--json", at=server)
    assert (ran.code, [job["id"] for job in json.loads(ran.out)]) == (2, ["j"])


@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_one_refused_job_does_not_stop_the_others(meshboard: Meshboard, server: FakeServer, command: str) -> None:
    ask = {"cancel": "cancel", "retry": "requeue"}[command]
    server.respond_at(f"jobs/a/{ask}", {"errors": [{"field": "request", "message": "no such thing"}]}, 404)
    server.respond_at(f"jobs/b/{ask}", {"errors": [{"field": "request", "message": "not yours"}]}, 403)
    server.respond_at(f"jobs/j/{ask}", JOB)
    ran = meshboard(command, "a", "b", "j", at=server)
    assert (ran.code, ran.out) == (3, "j  running      n\n")
    assert ran.err == "meshboard: job a: no such thing\nmeshboard: b: request: not yours\n"
    content = json.loads(meshboard(command, "a", "j", "--json", at=server).out)
    assert (content[0]["job"], content[0]["errors"][0]["message"], content[1]["id"]) == ("a", "no such thing", "j")


def test_baseline_set_tries_every_job(meshboard: Meshboard, server: FakeServer) -> None:
    refused = {"errors": [{"field": "job", "message": "a job that failed has no figures to hold to"}]}
    stored = {"project": "default", "branch": "main", "runs": [{"job": "j"}]}
    server.respond((409, refused), (200, stored), (403, {"errors": [{"field": "request", "message": "not yours"}]}))
    ran = meshboard("baseline", "set", "main", "a", "j", "b", at=server)
    assert (ran.code, ran.out, len(server.requests)) == (3, "", 3)
    assert ran.err.splitlines() == [
        "meshboard: a: job: a job that failed has no figures to hold to",
        "meshboard: b: request: not yours",
        "main: 1 run",
    ]
    server.respond((409, refused), (200, stored))
    ran = meshboard("baseline", "set", "main", "a", "j", "--json", at=server)
    content = json.loads(ran.out)
    assert (ran.code, content["runs"], [one["job"] for one in content["refused"]]) == (2, stored["runs"], ["a"])
    server.respond((409, refused))
    ran = meshboard("baseline", "set", "main", "a", "b", "--json", at=server)
    assert (ran.code, "runs" in json.loads(ran.out), "runs" in ran.err) == (2, False, False)
    server.respond((200, stored))
    ran = meshboard("baseline", "set", "main", "j", "k", "--json", at=server)
    assert (ran.code, json.loads(ran.out)) == (0, stored)


@pytest.mark.parametrize(
    ("url", "warned"),
    [("http://board.example", True), ("http://127.0.0.1:1", False), ("https://board.example", False)],
)
def test_warns_of_an_unencrypted_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, warned: bool
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MESHBOARD_URL", url)
    monkeypatch.setenv("MESHBOARD_TOKEN", "secret")
    with opened():
        pass
    content = capsys.readouterr().err
    assert content.count("does not use HTTPS. Others on the network can read the REST token.") == warned
    assert "secret" not in content


@pytest.mark.filterwarnings("error::DeprecationWarning")  # of httpx, which will not take a path for ever
def test_reports_missing_certificates(
    meshboard: Meshboard, server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHBOARD_CA", "/nowhere/ca.pem")
    ran = meshboard("status", at=server)
    assert (ran.code, ran.err.startswith("meshboard: MESHBOARD_CA: ")) == (ExitCode.WRONG, True)
    create_certificate(tmp_path)
    server.respond_at("jobs", [])
    for place in (tmp_path, tmp_path / "ca.pem"):
        monkeypatch.setenv("MESHBOARD_CA", str(place))
        assert meshboard("status", at=server).code == ExitCode.OK


NO_JOB = {"errors": [{"field": "job_id", "pointer": "", "in": "path", "message": "no such job"}]}


@pytest.mark.parametrize("words", [("status", "abc"), ("logs", "abc"), ("cancel", "abc"), ("gate", "abc", "--exact")])
def test_names_a_missing_job(meshboard: Meshboard, server: FakeServer, words: tuple[str, ...]) -> None:
    server.respond((404, NO_JOB))
    assert meshboard(*words, at=server) == (2, "", "meshboard: job abc: no such job\n")


def test_names_each_of_several_jobs_once(meshboard: Meshboard, server: FakeServer) -> None:
    server.respond((404, NO_JOB))
    ran = meshboard("cancel", "abc", "xyz", at=server)
    assert ran.err.splitlines() == [f"meshboard: job {name}: no such job" for name in ("abc", "xyz")]


@pytest.mark.parametrize(
    ("field", "what", "about"),
    [
        ("branch", "baseline", "baseline fix/1 of project vision"),
        ("project", "project", "project vision"),
        ("request", "baseline", "baseline fix/1 of project vision"),  # of an older board
    ],
)
def test_names_a_branch_without_a_baseline(
    meshboard: Meshboard, server: FakeServer, field: str, what: str, about: str
) -> None:
    server.respond((404, {"errors": [{"field": field, "message": f"no such {what}"}]}))
    ran = meshboard("baseline", "show", "fix/1", "--project", "vision", at=server)
    assert (ran.code, ran.err) == (2, f"meshboard: {about}: no such {what}\n")
