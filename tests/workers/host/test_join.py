"""`python -m workers.host.join`: what a machine does to become a host, and what it will not do."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from contracts.hosts import JOIN_PATH
from contracts.names import events_stream
from tests.support.processes import ROOT, RedisServer, base_environment, running, wait_until
from tests.support.web import Site, site
from workers.host import doctor, stop
from workers.host import settings as host
from workers.host.doctor import findings
from workers.host.join import AwayError, RefusedError, _ask, _board
from workers.host.joined import Kept, kept_file, read_or_make, write
from workers.host.settings import SettingError, host_settings


@pytest.fixture
def board(redis_service: RedisServer, tmp_path: Path) -> Iterator[Site]:
    with site(f"sqlite:///{tmp_path}/db.sqlite3", redis_service, tmp_path / "web") as made:
        yield made


def environment(folder: Path, **settings: str) -> dict[str, str]:
    return {**base_environment(), "MESHBOARD_STATE_DIR": str(folder / "state"), **settings}


def heartbeats(redis: RedisServer) -> int:
    return int(redis.client().xlen(events_stream("gpu-7")))


JOIN = [sys.executable, "-m", "workers.host.join"]


@contextmanager
def joined(
    board: Site, redis: RedisServer, folder: Path, log: str, **settings: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The one command, until the host speaks."""
    before = heartbeats(redis)
    argv, log_file = [*JOIN, board.url, "--name", "gpu-7", "--slots", "3"], folder / log
    with running(argv, environment(folder, **settings), log_file) as process:
        wait_until(lambda: heartbeats(redis) > before or process.poll() is not None, "the host speaks", 90)
        assert process.poll() is None, log_file.read_text()
        yield process


def token(board: Site) -> str:
    made = board.call("POST", "/api/v1/join-tokens", {"uses": 1}, headers=board.token("staff")).json()
    return str(made["token"])


def test_a_machine_joins_with_one_command(board: Site, redis_service: RedisServer, tmp_path: Path) -> None:
    text, file = token(board), tmp_path / "token"
    file.write_text(f"{text}\n")
    with joined(board, redis_service, tmp_path, "join.log", MESHBOARD_JOIN_TOKEN_FILE=str(file)) as process:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert text.encode() not in environ + Path(f"/proc/{process.pid}/cmdline").read_bytes()
    kept = tmp_path / "state" / "hosts" / "gpu-7.json"
    assert (stat.S_IMODE(kept.stat().st_mode), stat.S_IMODE(kept.parent.stat().st_mode)) == (0o600, 0o700)
    [listed] = board.call("GET", "/api/v1/hosts", headers=board.token("owner")).json()
    assert (listed["name"], listed["slots"], listed["state"]) == ("gpu-7", 3, "connected")


@pytest.mark.slow
def test_it_comes_back_while_the_board_is_away_and_its_doctor_finds_that(
    board: Site, redis_service: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(board, redis_service, tmp_path, "join.log", MESHBOARD_JOIN_TOKEN=token(board)):
        board.process.kill()
        board.process.wait()
    with joined(board, redis_service, tmp_path, "again.log"):
        assert "going on with what was kept" in (tmp_path / "again.log").read_text()
    for name, value in environment(tmp_path, MESHBOARD_HOST_NAME="gpu-7", MESHBOARD_URL=board.url).items():
        monkeypatch.setenv(name, value)
    well = ("joined", "Redis", "clock", "ports", "torch")
    told = {found.subject: found.level for found in findings() if found.subject in (*well, "board")}
    assert told == {**dict.fromkeys(well, "ok"), "board": "warn"}
    redis_service.client().execute_command("ACL DELUSER", "meshboard-host-gpu-7")
    [of_redis] = [found for found in findings() if found.subject == "Redis"]
    assert (of_redis.level, "does not know this host" in of_redis.words) == ("fail", True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Use https://HOST"),
        (["ftp://board"], "Use https://HOST"),
        (["http://192.0.2.1:8000"], "would send the token"),
        (["http://127.0.0.1:1", "--name", "a:b"], "MESHBOARD_HOST_NAME is 'a:b'."),
        (["http://127.0.0.1:1", "--slots", "0"], "MESHBOARD_SLOTS is '0'."),
        (["http://192.0.2.1:8000", "MESHBOARD_JOIN_INSECURE=yes"], "MESHBOARD_JOIN_INSECURE is 'yes'. Use 1 or 0."),
        (["http://127.0.0.1:1", "MESHBOARD_DEVICE=gpu"], "MESHBOARD_DEVICE is 'gpu'. Use cpu or cuda."),
    ],
)
def test_what_it_will_not_do_is_told_before_anything_is_sent(tmp_path: Path, arguments: list[str], words: str) -> None:
    set_to = dict(argument.split("=") for argument in arguments if "=" in argument)
    argv = [*JOIN, *(argument for argument in arguments if "=" not in argument)]
    ran = subprocess.run(
        argv, env=environment(tmp_path, **set_to), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "arguments are required: RUN_DIR"), (["/none"], "/none is not a folder. No process was stopped.")],
)
def test_who_ends_all_of_a_host_names_a_folder_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["stop", *arguments])
    with pytest.raises(SystemExit) as ended:
        stop.main()
    assert (ended.value.code, words in capsys.readouterr().err) == (2, True)


def test_stop_reports_the_number_of_ended_attempts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["stop", str(tmp_path)])
    assert stop.main() == 0
    assert capsys.readouterr().out == "0 attempts ended\n"


def test_plain_http_is_for_this_machine_or_on_purpose() -> None:
    for url in ("http://127.0.0.1:8000", "http://localhost:8000/", "https://board.example/sub/"):
        assert _board(url, insecure=False) == url.rstrip("/")
    assert _board("http://web:8000", insecure=True) == "http://web:8000"


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every post so, and where it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


REFUSAL = json.dumps({"errors": [{"field": "name", "message": "another machine"}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (409, REFUSAL, RefusedError, "returned HTTP 409: name: another machine"),
        (401, b"<html>", RefusedError, "returned HTTP 401"),
        (404, b"\xff\xfe", RefusedError, "returned HTTP 404"),
        (200, b"welcome", RefusedError, "is not a Meshboard board"),
        (200, b'{"name": 1}', RefusedError, "is not a Meshboard board"),
        (200, b"[]", RefusedError, "is not a Meshboard board"),
        (503, REFUSAL, AwayError, "returned HTTP 503: name: another machine"),
        (429, b"", AwayError, "returned HTTP 429"),
    ],
)
def test_what_the_board_says_is_told_and_only_what_passes_is_asked_again(
    status: int, body: bytes, kind: type[Exception], words: str
) -> None:
    with answering(status, body) as (url, asked), pytest.raises(kind, match=words):
        _ask(url, {"name": "gpu-7"})  # type: ignore[typeddict-item]
    assert asked == [JOIN_PATH]


def test_a_token_goes_nowhere_that_nobody_named() -> None:
    with answering(200, b"{}") as (elsewhere, stolen):
        for status in (301, 302, 303, 307, 308):
            with answering(status, b"", Location=elsewhere) as (url, _), pytest.raises(RefusedError, match=elsewhere):
                _ask(url, {"token": "secret"})  # type: ignore[typeddict-item]
    assert stolen == []


def test_nobody_there_is_waited_for() -> None:
    with pytest.raises(AwayError, match="Cannot reach"):
        _ask("http://127.0.0.1:1", {"name": "gpu-7"})  # type: ignore[typeddict-item]


def test_an_identity_is_made_once_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = kept_file(tmp_path, "gpu-7")
    made = read_or_make(path)
    assert (len(made.identity) >= 32, made.key) == (True, "")
    assert read_or_make(path) == made
    write(path, Kept(made.identity, "redis://x", "00"))
    assert read_or_make(path).key == "00"
    path.chmod(0o640)
    with pytest.raises(SettingError, match="Other users can read"):
        read_or_make(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": "x"}', "null", "\0"])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = kept_file(tmp_path, "gpu-7")
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingError, match=str(path)):
        read_or_make(path)


def test_a_machine_is_called_what_it_joined_as_until_it_joined_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its doctor, and who starts it again, need not say so again."""
    monkeypatch.delenv("MESHBOARD_HOST_NAME", raising=False)
    monkeypatch.setenv("MESHBOARD_STATE_DIR", str(tmp_path))
    machine = host_settings(joined=False).name
    read_or_make(kept_file(tmp_path, "gpu-7"))
    assert host_settings(joined=False).name == "gpu-7"
    read_or_make(kept_file(tmp_path, "gpu-8"))
    assert host_settings(joined=False).name == machine
    write(kept_file(tmp_path, "gpu-7"), Kept("identity", "redis://board", "key"))
    assert host_settings(joined=False).name == "gpu-7", "it asked as gpu-8 too, and was refused"
    monkeypatch.setenv("MESHBOARD_HOST_NAME", "gpu-8")
    assert host_settings(joined=False).name == "gpu-8"


def test_what_is_set_to_nothing_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `NAME=` in a unit's file of settings, which runs in /: all of the machine would have been the script root."""
    text = (ROOT / "workers/host/settings.py").read_text()
    names = set(re.findall(r"MESHBOARD_[A-Z][A-Z_]*[A-Z]", text))
    for name in names:
        monkeypatch.delenv(name, raising=False)
    unset = host_settings(joined=False)
    for name in names:
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    assert host_settings(joined=False) == unset
    assert unset.script_root == ROOT / "var" / "scripts"
    monkeypatch.setattr(host, "CHECKOUT", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "kept"))
    assert host_settings(joined=False).state_dir == tmp_path / "kept" / "meshboard"
    monkeypatch.setenv("MESHBOARD_STATE_DIR", "~/board")
    assert host_settings(joined=False).state_dir == Path.home() / "board"


@pytest.mark.parametrize(
    ("gpus", "set_to", "device", "slots"),
    [
        (8, {}, "cuda", 8),
        (8, {"MESHBOARD_DEVICE": "cuda"}, "cuda", 8),
        (8, {"MESHBOARD_SLOTS": "2"}, "cuda", 2),
        (8, {"MESHBOARD_DEVICE": "cpu"}, "cpu", max(4, os.cpu_count() or 1)),
        (0, {}, "cpu", max(4, os.cpu_count() or 1)),
        (0, {"MESHBOARD_DEVICE": "cuda", "MESHBOARD_SLOTS": "1"}, "cuda", 1),
    ],
)
def test_slots_are_gpus_for_who_joins_and_for_its_doctor_too(
    monkeypatch: pytest.MonkeyPatch, gpus: int, set_to: dict[str, str], device: str, slots: int
) -> None:
    for name in ("MESHBOARD_DEVICE", "MESHBOARD_SLOTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host, "Gpus", lambda: range(gpus))
    found = host_settings(joined=False)
    assert (found.device, found.slots) == (device, slots)


@pytest.mark.parametrize(
    ("seen", "slots", "right"), [("0,1", 2, True), ("0, 1,5", 2, True), ("2,3", 2, False), ("0", 2, False)]
)
def test_gpus_that_cuda_is_not_to_see_are_no_slots(
    seen: str, slots: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job was given the first ones, whoever was at work there."""
    for name, value in (("MESHBOARD_DEVICE", "cuda"), ("MESHBOARD_SLOTS", str(slots)), ("CUDA_VISIBLE_DEVICES", seen)):
        monkeypatch.setenv(name, value)
    if right:
        assert host_settings(joined=False).slots == slots
        return
    with pytest.raises(SettingError, match=f"CUDA_VISIBLE_DEVICES is '{seen}', but jobs use GPUs 0 to 1"):
        host_settings(joined=False)


def test_a_device_that_the_driver_does_not_tell_of_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHBOARD_SLOTS", raising=False)
    monkeypatch.setenv("MESHBOARD_DEVICE", "cuda")
    monkeypatch.setattr(host, "Gpus", list)
    with pytest.raises(SettingError, match="the driver reports no GPU"):
        host_settings(joined=False)


@pytest.mark.parametrize(("address", "place"), [("127.0.0.1", r"127\.0\.0\.1:\d"), ("::1", r"\[::1\]:\d")])
def test_the_doctor_listens_where_the_host_would(address: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_ADDRESS", address)
    [told] = doctor._address(host_settings(joined=False), "")
    assert told.level == "ok", told.words
    assert re.match(f"can listen on {place}", told.words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_state_directory_that_is_not_ours_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SettingError, match="MESHBOARD_STATE_DIR"):
        read_or_make(kept_file(tmp_path, "gpu-7"))
