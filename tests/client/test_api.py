"""The client against a server that is away, busy, wrong or slow to end a job."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from meshboard import AwayError, Client, RefusedError, TimedOutError, access, api, files, shown


class Answers(BaseHTTPRequestHandler):
    """Says what it was told to, one answer after another, the last for ever."""

    answers: list[tuple[int, dict[str, str], bytes]] = []
    asked: list[str] = []

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        Answers.asked.append(f"{self.command} {self.path}")
        status, headers, body = Answers.answers.pop(0) if len(Answers.answers) > 1 else Answers.answers[0]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(api, "POLL_S", 0.01)
    Answers.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Client(f"http://127.0.0.1:{server.server_port}", "t") as client:
        yield client
    server.shutdown()
    server.server_close()


def says(*answers: tuple[int, Any]) -> None:
    Answers.answers = [(status, {}, json.dumps(told).encode()) for status, told in answers]


JOB = {"id": "j", "name": "n", "status": "running", "finished": False, "history": []}


def test_a_busy_board_is_asked_again(board: Client) -> None:
    Answers.answers = [(503, {"Retry-After": "0"}, b"{}"), (200, {}, json.dumps(JOB).encode())]
    assert board.job("j").status == "running"
    assert len(Answers.asked) == 2


def test_a_submit_is_repeated_only_under_a_key(board: Client) -> None:
    Answers.answers = [(503, {"Retry-After": "0"}, b"{}"), (201, {}, json.dumps(JOB).encode())]
    assert board.submit({}, key="build-1").id == "j"
    gone = Client("http://127.0.0.1:1", "t")
    with pytest.raises(AwayError, match="cannot be reached"):
        gone.submit({})


def test_a_refusal_names_every_field(board: Client) -> None:
    says((422, {"errors": [{"field": "layout.tp", "message": "4 = 1 x 3 + 1"}, {"field": "name", "message": "no"}]}))
    with pytest.raises(RefusedError, match=r"layout.tp: 4 = 1 x 3 \+ 1\nname: no"):
        board.submit({})


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"errors": 3}'])
def test_what_is_no_board_is_told(board: Client, body: bytes) -> None:
    Answers.answers = [(500, {}, body)]
    with pytest.raises(AwayError, match="nothing that a board says"):
        board.job("j")


def test_waiting_ends_with_the_job_or_with_the_time(board: Client) -> None:
    says((200, JOB), (200, {**JOB, "status": "succeeded", "finished": True}))
    assert board.wait("j").succeeded
    says((200, JOB))
    with pytest.raises(TimedOutError, match=r"still running after 0.05 s"):
        board.wait("j", timeout_s=0.05)


def test_pages_follow_each_other(board: Client) -> None:
    link = {"Link": '<http://elsewhere/api/v1/jobs?limit=1&offset=1>; rel="next"'}
    first, second = (json.dumps([{**JOB, "id": name}]).encode() for name in "ab")
    Answers.answers = [(200, link, first), (200, {}, second)]
    assert [brief["id"] for brief in board.jobs(limit=1)] == ["a", "b"]
    assert Answers.asked[-1].endswith("limit=1&offset=1")


def test_a_token_goes_to_the_board_it_is_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("MESHBOARD_URL", "MESHBOARD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(access.NoAccessError, match="meshboard login"):
        access.find()
    kept = access.keep(access.Access("https://one", "secret"))
    assert kept.stat().st_mode & 0o777 == 0o600
    assert access.find() == ("https://one", "secret")
    monkeypatch.setenv("MESHBOARD_URL", "https://another")
    with pytest.raises(access.NoAccessError, match="MESHBOARD_TOKEN"):
        access.find()
    kept.write_text("{")
    with pytest.raises(access.NoAccessError, match="cannot be read"):
        access.find()


def test_fields_are_set_from_the_command_line(tmp_path: Any) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("layout: {dp: 2}\n")
    assert files.spec(str(file), ["layout.dp=4", "train.data=text", "name=a b"]) == {
        "layout": {"dp": 4},
        "train": {"data": "text"},
        "name": "a b",
    }
    for wrong in ("layout", "layout.=1", "layout.dp.x=1"):
        with pytest.raises(files.FileError, match="--set"):
            files.spec(str(file), [wrong])
    file.write_text("- 1")
    with pytest.raises(files.FileError, match="a spec is a mapping"):
        files.spec(str(file))


def test_a_name_says_nothing_to_the_terminal() -> None:
    assert "\x1b" not in shown.job_line(api.Job({**JOB, "name": "\x1b[31mred\nnext"}))
