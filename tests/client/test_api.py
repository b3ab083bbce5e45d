"""The client against a server that is away, busy, wrong or slow to end a job."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from meshboard import AwayError, Client, RefusedError, TimedOutError, credentials, follow, spec_files, transport
from meshboard import client as client_module
from meshboard.errors import WrongError
from tests.client.conftest import FakeServer, answer

JOB = {"id": "j", "name": "n", "status": "running", "finished": False, "attempt": 1, "history": []}
ENDED = {**JOB, "status": "succeeded", "finished": True}


def test_retries_a_busy_board(server: FakeServer, board: Client) -> None:
    server.answers = [answer(503, {}, **{"Retry-After": "0"}), answer(200, JOB)]
    assert board.job("j").status == "running"
    assert len(server.requests) == 2


def test_repeats_a_submit_only_with_a_key(server: FakeServer, board: Client) -> None:
    server.answers = [answer(503, {}, **{"Retry-After": "0"}), answer(201, JOB)]
    assert board.submit({}, key="build-1").id == "j"
    server.answers = [answer(503, {}, **{"Retry-After": "0"}), answer(201, JOB)]
    with pytest.raises(AwayError):
        board.submit({})
    assert len(server.requests) == 3, "whether the first one was done is not known"
    gone = Client("http://127.0.0.1:1", "t")
    with pytest.raises(AwayError, match="Cannot reach"):
        gone.submit({})


@pytest.mark.parametrize(
    ("error", "done"), [(httpx.ReadError("reset"), True), (httpx.ConnectError("refused"), False), (None, True)]
)
def test_repeated_delete_of_a_deleted_object_succeeds(
    server: FakeServer, board: Client, monkeypatch: pytest.MonkeyPatch, error: Exception | None, done: bool
) -> None:
    """Its answer was lost, or a 503; one that was never sent has deleted nothing."""
    send, lost = httpx.Client.request, [error] if error else []

    def loses(*requested: Any, **how: Any) -> httpx.Response:
        if lost:
            raise lost.pop()
        return send(*requested, **how)

    monkeypatch.setattr(httpx.Client, "request", loses)
    missing = answer(404, {"errors": [{"field": "branch", "message": "no such baseline"}]})
    server.answers = [missing] if error else [answer(503, {}, **{"Retry-After": "0"}), missing]
    if done:
        board.forget_baseline("default", "main")
    else:
        with pytest.raises(RefusedError, match="no such baseline"):
            board.forget_baseline("default", "main")


def test_copies_resumes_and_changes_jobs(server: FakeServer, board: Client) -> None:
    server.respond((201, JOB))
    assert board.copy("j", {"layout": {"tp": 2}}).id == "j"
    assert not board.resume("j", key="build-1").already_existed
    assert board.change("j", add_tags=["ci"], archived=True).status == "running"
    server.respond((200, [{"name": "j-1-10", "step": 10}]))
    assert board.checkpoints("j")[0]["step"] == 10
    server.respond((200, {"attempt": 1}))
    assert board.results("j") == {"attempt": 1}
    posted = ["POST /api/v1/jobs/j/copy", "POST /api/v1/jobs/j/resume", "PATCH /api/v1/jobs/j"]
    assert server.requests == [*posted, "GET /api/v1/jobs/j/checkpoints", "GET /api/v1/jobs/j/results"]


def test_refused_error_names_every_field(server: FakeServer, board: Client) -> None:
    content = [{"field": "layout.tp", "message": "4 = 1 x 3 + 1"}, {"field": "name", "message": "no"}]
    server.respond((422, {"type": "/docs/errors/#spec", "status": 422, "errors": content}))
    with pytest.raises(RefusedError, match=r"layout.tp: 4 = 1 x 3 \+ 1\nname: no"):
        board.submit({})


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"errors": 3}'])
def test_reports_a_server_that_is_not_a_board(server: FakeServer, board: Client, body: bytes) -> None:
    server.answers = [answer(500, body)]
    with pytest.raises(AwayError, match="not the response of a board"):
        board.job("j")


def test_wait_ends_with_the_job_or_the_timeout(server: FakeServer, board: Client) -> None:
    server.respond_at("jobs/j", JOB)
    server.respond_at("jobs/j/wait", {"reached": True, "job": ENDED})
    assert board.wait("j").succeeded
    assert server.requests == ["GET /api/v1/jobs/j", "GET /api/v1/jobs/j/wait?for=finished&timeout=60"]
    server.respond_at("jobs/j/wait", {"reached": False, "job": JOB})
    with pytest.raises(TimedOutError, match=r"still running after 0.05 s"):
        board.wait("j", timeout_s=0.05)


def test_wait_ends_in_time_for_a_busy_board(server: FakeServer, board: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "GRACE_S", 0.1)
    slept: list[float] = []
    monkeypatch.setattr(transport.time, "sleep", slept.append)
    server.respond_at("jobs/j", JOB)
    busy = {"errors": [{"field": "request", "message": "too much at once"}]}
    server.at["jobs/j/wait"] = answer(429, busy, **{"Retry-After": "60"})
    with pytest.raises(TimedOutError, match=r"still running after 0.05 s"):
        board.wait("j", timeout_s=0.05)
    assert sum(slept) < 10


def test_polls_an_older_board_that_cannot_wait(server: FakeServer, board: Client) -> None:
    server.respond_at("jobs/j/wait", {"errors": [{"field": "request", "message": "no such thing"}]}, 404)
    server.respond((200, JOB), (200, JOB), (200, JOB), (200, ENDED))
    received: list[str] = []
    assert board.wait("j", each=lambda job: received.append(job.status)).succeeded
    assert received == ["running", "running", "running", "succeeded"]
    assert sum("/wait" in requested for requested in server.requests) == 1, "it is asked once whether it knows"
    server.answers = []
    with pytest.raises(RefusedError, match="no such thing"):
        board.wait("nobodys")


def test_wait_continues_after_an_outage(server: FakeServer, board: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    server.respond_at("jobs/j", JOB)
    server.answers = [answer(502, b"<html>"), answer(429, {"errors": []}), answer(200, {"reached": True, "job": ENDED})]
    assert board.wait("j").succeeded
    server.answers = [answer(502, b"<html>")]
    monkeypatch.setattr(transport, "MAX_OUTAGE_S", 0.0)
    with pytest.raises(AwayError, match="502"):
        board.wait("j")
    server.respond((401, {"errors": [{"field": "request", "message": "the token has expired"}]}))
    with pytest.raises(RefusedError, match="expired"):
        board.wait("j")


def test_follows_a_log_through_an_outage(server: FakeServer, board: Client) -> None:
    """An outage before the first response is an error."""
    output = {"rank": 0, "first": 0, "lines": ["one"], "skipped": 0}
    stream = f"event: log\ndata: {json.dumps(output)}\n\nevent: end\ndata: {{}}\n\n".encode()
    away = answer(502, b"<html>")
    server.answers = [away]
    with pytest.raises(AwayError, match="502"):
        next(board.follow_log("j", 0, attempt=1))
    ended = answer(200, {"reached": True, "job": ENDED})
    server.answers = [answer(200, JOB), away, away, (200, {}, stream), away, ended]
    assert list(follow.follow_lines(board, "j", 0)) == ["one"]


def test_follows_links_to_the_next_page(server: FakeServer, board: Client) -> None:
    link = {"Link": '<http://elsewhere/api/v1/jobs?limit=1&offset=1>; rel="next"'}
    first, second = (json.dumps([{**JOB, "id": name}]).encode() for name in "ab")
    server.answers = [(200, link, first), (200, {}, second)]
    assert [brief["id"] for brief in board.jobs(limit=1)] == ["a", "b"]
    assert server.requests[-1].endswith("limit=1&offset=1")


def test_sends_a_token_only_to_its_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("MESHBOARD_URL", "MESHBOARD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(credentials.NoCredentialsError, match="meshboard login"):
        credentials.load_credentials()
    stored = credentials.save_credentials(credentials.Credentials("https://one", "secret"))
    assert stored.stat().st_mode & 0o777 == 0o600
    assert credentials.load_credentials() == ("https://one", "secret")
    monkeypatch.setenv("MESHBOARD_URL", "https://one/")
    assert credentials.load_credentials() == ("https://one", "secret")
    monkeypatch.setenv("MESHBOARD_URL", "https://another")
    with pytest.raises(credentials.NoCredentialsError, match="MESHBOARD_TOKEN"):
        credentials.load_credentials()
    stored.write_text("{")
    with pytest.raises(credentials.NoCredentialsError, match="Cannot read"):
        credentials.load_credentials()


@pytest.mark.parametrize("token", ["se cret", "se\ncret", "gehëim", "\x00"])
def test_does_not_quote_an_invalid_token(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    with pytest.raises(WrongError) as refused:
        credentials.parse_token(token)
    assert token not in str(refused.value)
    assert credentials.parse_token("secret\n") == "secret", "as `$(cat file)` and a CI's variables end"


NO_ADDRESSES = (
    *("board.example", "ftp://board", "https://", "https://[", "https://me:secret@board", "https://board?t=secret"),
    *("notaurl", "localhost:8000", "//board", "https:/board", "https://board .example", "https://board/a b"),
    *("http://board:port", "http://board:99999", "http://::1:8000", "http://[::1", "http://[v1.a]", "https://xn--"),
    *("https://a..b", f"https://{'a' * 64}.example", "https://999.1.1.1", "https://board#secret"),
)


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_rejects_invalid_board_addresses_without_quoting_secrets(meshboard: Any, monkeypatch: Any, url: str) -> None:
    """An invalid address is a usage error for `login` and for MESHBOARD_URL."""
    monkeypatch.setenv("MESHBOARD_URL", url)
    for words, source in (("login", url), "URL"), (("status", "j"), "MESHBOARD_URL"):
        ran = meshboard(*words)
        assert (ran.code, ran.err.startswith(f"meshboard: {source}: Use an address "), ran.out) == (2, True, "")
        assert "secret" not in ran.err
    with pytest.raises(WrongError, match="url: Use an address"):
        Client(url, "t")


@pytest.mark.parametrize("url", ["https://board/sub/", "http://[::1]:8000", "HTTPS://Board", "https://bücher.example"])
def test_accepts_board_addresses_with_paths(url: str) -> None:
    assert credentials.parse_board_url(f" {url}\n") == url.rstrip("/")


def test_sets_spec_fields_from_options(tmp_path: Any) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("layout: {dp: 2}\n")
    assert spec_files.read_spec(str(file), ["layout.dp=4", "train.data=text", "name=a b"]) == {
        "layout": {"dp": 4},
        "train": {"data": "text"},
        "name": "a b",
    }
    for wrong in ("layout", "layout.=1", "layout.dp.x=1"):
        with pytest.raises(spec_files.SpecFileError, match="--set"):
            spec_files.read_spec(str(file), [wrong])
    file.write_text("- 1")
    with pytest.raises(spec_files.SpecFileError, match="Use a mapping"):
        spec_files.read_spec(str(file))
