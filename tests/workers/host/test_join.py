"""`python -m workers.host.join`, the settings of a host, and its log as JSON."""

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
from tests.support.processes import ROOT, RedisServer, base_environment, run_process, scale_timeout, wait_until
from tests.support.web import Site, run_site
from webapp.runner import find_free_port
from workers.host import doctor, stop
from workers.host import settings as host
from workers.host.doctor import check_host
from workers.host.join import JoinRefusedError, UnreachableError, _check_url, _send, build_worker_command
from workers.host.settings import (
    LOG_FORMAT_VARIABLE,
    LOG_LEVEL_VARIABLE,
    HostCredentials,
    HostSettingError,
    get_credentials_file,
    get_log_format,
    load_or_create_credentials,
    read_host_settings,
    save_credentials,
)

JOIN = [sys.executable, "-m", "workers.host.join"]
REFUSAL = json.dumps({"errors": [{"field": "name", "message": "another machine"}]}).encode()


@pytest.fixture
def board(redis_service: RedisServer, tmp_path: Path) -> Iterator[Site]:
    with run_site(f"sqlite:///{tmp_path}/db.sqlite3", redis_service, tmp_path / "web") as made:
        yield made


def environment(folder: Path, **settings: str) -> dict[str, str]:
    return {**base_environment(), "MESHBOARD_STATE_DIR": str(folder / "state"), **settings}


def heartbeats(redis: RedisServer) -> int:
    return int(redis.client().xlen(events_stream("gpu-7")))


@contextmanager
def joined(
    board: Site, redis: RedisServer, folder: Path, log: str, **settings: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the join command until the host sends a heartbeat."""
    before = heartbeats(redis)
    argv, log_file = [*JOIN, board.url, "--name", "gpu-7", "--slots", "3"], folder / log
    with run_process(argv, environment(folder, **settings), log_file) as process:
        wait_until(lambda: heartbeats(redis) > before or process.poll() is not None, "the host speaks", 90)
        assert process.poll() is None, log_file.read_text()
        yield process


def token(board: Site) -> str:
    made = board.call("POST", "/api/v1/join-tokens", {"uses": 1}, headers=board.build_token_header("staff")).json()
    return str(made["token"])


def test_machine_joins_with_one_command(board: Site, redis_service: RedisServer, tmp_path: Path) -> None:
    text, file = token(board), tmp_path / "token"
    file.write_text(f"{text}\n")
    with joined(board, redis_service, tmp_path, "join.log", MESHBOARD_JOIN_TOKEN_FILE=str(file)) as process:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert text.encode() not in environ + Path(f"/proc/{process.pid}/cmdline").read_bytes()
    stored = tmp_path / "state" / "hosts" / "gpu-7.json"
    assert (stat.S_IMODE(stored.stat().st_mode), stat.S_IMODE(stored.parent.stat().st_mode)) == (0o600, 0o700)
    [listed] = board.call("GET", "/api/v1/hosts", headers=board.build_token_header("owner")).json()
    assert (listed["name"], listed["slots"], listed["state"]) == ("gpu-7", 3, "connected")


@pytest.mark.slow
def test_host_starts_while_the_board_is_unreachable(
    board: Site, redis_service: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(board, redis_service, tmp_path, "join.log", MESHBOARD_JOIN_TOKEN=token(board)):
        board.process.kill()
        board.process.wait()
    with joined(board, redis_service, tmp_path, "again.log"):
        assert "continuing with the settings stored in" in (tmp_path / "again.log").read_text()
    for name, value in environment(tmp_path, MESHBOARD_HOST_NAME="gpu-7", MESHBOARD_URL=board.url).items():
        monkeypatch.setenv(name, value)
    well = ("joined", "Redis", "clock", "ports", "torch")
    result = {found.subject: found.level for found in check_host() if found.subject in (*well, "board")}
    assert result == {**dict.fromkeys(well, "ok"), "board": "warn"}
    redis_service.client().execute_command("ACL DELUSER", "meshboard-host-gpu-7")
    [of_redis] = [found for found in check_host() if found.subject == "Redis"]
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
def test_reports_invalid_settings_before_sending(tmp_path: Path, arguments: list[str], words: str) -> None:
    set_to = dict(argument.split("=") for argument in arguments if "=" in argument)
    argv = [*JOIN, *(argument for argument in arguments if "=" not in argument)]
    ran = subprocess.run(
        argv,
        env=environment(tmp_path, **set_to),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=scale_timeout(60),  # a host that accepts the address tries to reach it forever
    )
    assert ran.returncode == 1
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "arguments are required: RUN_DIR"), (["/none"], "/none is not a folder. No process was stopped.")],
)
def test_stop_needs_an_existing_folder(
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


def test_plain_http_needs_loopback_or_insecure() -> None:
    for url in ("http://127.0.0.1:8000", "http://localhost:8000/", "https://board.example/sub/"):
        assert _check_url(url, insecure=False) == url.rstrip("/")
    assert _check_url("http://web:8000", insecure=True) == "http://web:8000"


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """Run a server with a fixed response, and yield its address and the requests."""
    request: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", request
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (409, REFUSAL, JoinRefusedError, "returned HTTP 409: name: another machine"),
        (401, b"<html>", JoinRefusedError, "returned HTTP 401"),
        (404, b"\xff\xfe", JoinRefusedError, "returned HTTP 404"),
        (200, b"welcome", JoinRefusedError, "is not a Meshboard board"),
        (200, b'{"name": 1}', JoinRefusedError, "is not a Meshboard board"),
        (200, b"[]", JoinRefusedError, "is not a Meshboard board"),
        (503, REFUSAL, UnreachableError, "returned HTTP 503: name: another machine"),
        (429, b"", UnreachableError, "returned HTTP 429"),
    ],
)
def test_reports_the_board_error_and_retries_only_temporary_ones(
    status: int, body: bytes, kind: type[Exception], words: str
) -> None:
    with answering(status, body) as (url, request), pytest.raises(kind, match=words):
        _send(url, {"name": "gpu-7"})  # type: ignore[typeddict-item]
    assert request == [JOIN_PATH]


def test_token_does_not_follow_redirects() -> None:
    with answering(200, b"{}") as (elsewhere, stolen):
        for status in (301, 302, 303, 307, 308):
            with (
                answering(status, b"", Location=elsewhere) as (url, _),
                pytest.raises(JoinRefusedError, match=elsewhere),
            ):
                _send(url, {"token": "secret"})  # type: ignore[typeddict-item]
    assert stolen == []


def test_retries_an_unreachable_board() -> None:
    with pytest.raises(UnreachableError, match="Cannot reach"):
        _send("http://127.0.0.1:1", {"name": "gpu-7"})  # type: ignore[typeddict-item]


def test_identity_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = get_credentials_file(tmp_path, "gpu-7")
    made = load_or_create_credentials(path)
    assert (len(made.identity) >= 32, made.key) == (True, "")
    assert load_or_create_credentials(path) == made
    save_credentials(path, HostCredentials(made.identity, "redis://x", "00"))
    assert load_or_create_credentials(path).key == "00"
    path.chmod(0o640)
    with pytest.raises(HostSettingError, match="Other users can read"):
        load_or_create_credentials(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": "x"}', "null", "\0"])
def test_names_an_invalid_credentials_file(tmp_path: Path, text: str) -> None:
    path = get_credentials_file(tmp_path, "gpu-7")
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(HostSettingError, match=str(path)):
        load_or_create_credentials(path)


def test_host_name_defaults_to_the_only_joined_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the doctor and a restart find the name."""
    monkeypatch.delenv("MESHBOARD_HOST_NAME", raising=False)
    monkeypatch.setenv("MESHBOARD_STATE_DIR", str(tmp_path))
    machine = read_host_settings(joined=False).name
    load_or_create_credentials(get_credentials_file(tmp_path, "gpu-7"))
    assert read_host_settings(joined=False).name == "gpu-7"
    load_or_create_credentials(get_credentials_file(tmp_path, "gpu-8"))
    assert read_host_settings(joined=False).name == machine
    save_credentials(get_credentials_file(tmp_path, "gpu-7"), HostCredentials("identity", "redis://board", "key"))
    assert read_host_settings(joined=False).name == "gpu-7", "it asked as gpu-8 too, and was refused"
    monkeypatch.setenv("MESHBOARD_HOST_NAME", "gpu-8")
    assert read_host_settings(joined=False).name == "gpu-8"


def test_empty_variable_counts_as_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check `NAME=` in a settings file. The script root would otherwise be the working directory, which can be /."""
    text = (ROOT / "workers/host/settings.py").read_text()
    names = set(re.findall(r"MESHBOARD_[A-Z][A-Z_]*[A-Z]", text))
    for name in names:
        monkeypatch.delenv(name, raising=False)
    unset = read_host_settings(joined=False)
    for name in names:
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    assert read_host_settings(joined=False) == unset
    assert unset.script_root == ROOT / "var" / "scripts"
    monkeypatch.setattr(host, "CHECKOUT", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "kept"))
    assert read_host_settings(joined=False).state_dir == tmp_path / "kept" / "meshboard"
    monkeypatch.setenv("MESHBOARD_STATE_DIR", "~/board")
    assert read_host_settings(joined=False).state_dir == Path.home() / "board"


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
def test_slots_default_to_gpus_in_join_and_doctor(
    monkeypatch: pytest.MonkeyPatch, gpus: int, set_to: dict[str, str], device: str, slots: int
) -> None:
    for name in ("MESHBOARD_DEVICE", "MESHBOARD_SLOTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host, "Gpus", lambda: range(gpus))
    found = read_host_settings(joined=False)
    assert (found.device, found.slots) == (device, slots)


@pytest.mark.parametrize(
    ("seen", "slots", "right"), [("0,1", 2, True), ("0, 1,5", 2, True), ("2,3", 2, False), ("0", 2, False)]
)
def test_rejects_slots_hidden_by_cuda_visible_devices(
    seen: str, slots: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that jobs do not use GPUs that the variable hides."""
    for name, value in (("MESHBOARD_DEVICE", "cuda"), ("MESHBOARD_SLOTS", str(slots)), ("CUDA_VISIBLE_DEVICES", seen)):
        monkeypatch.setenv(name, value)
    if right:
        assert read_host_settings(joined=False).slots == slots
        return
    with pytest.raises(HostSettingError, match=f"CUDA_VISIBLE_DEVICES is '{seen}', but jobs use GPUs 0 to 1"):
        read_host_settings(joined=False)


def test_rejects_cuda_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHBOARD_SLOTS", raising=False)
    monkeypatch.setenv("MESHBOARD_DEVICE", "cuda")
    monkeypatch.setattr(host, "Gpus", list)
    with pytest.raises(HostSettingError, match="the driver reports no GPU"):
        read_host_settings(joined=False)


@pytest.mark.parametrize(("address", "place"), [("127.0.0.1", r"127\.0\.0\.1:\d"), ("::1", r"\[::1\]:\d")])
def test_doctor_listens_on_the_host_address(address: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_ADDRESS", address)
    [result] = doctor._check_ports(read_host_settings(joined=False), "")
    assert result.level == "ok", result.words
    assert re.match(f"can listen on {place}", result.words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_names_a_state_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(HostSettingError, match="MESHBOARD_STATE_DIR"):
        load_or_create_credentials(get_credentials_file(tmp_path, "gpu-7"))


def test_each_log_line_is_a_json_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a worker without Redis, which logs many lines."""
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    environment = {
        **base_environment(),
        LOG_FORMAT_VARIABLE: "json",
        "MESHBOARD_REDIS_URL": f"redis://127.0.0.1:{find_free_port()}/0",
        "MESHBOARD_HOST_KEY": "00" * 32,
        "MESHBOARD_STATE_DIR": str(tmp_path),
        "MESHBOARD_SANDBOX": "off",
    }
    written = tmp_path / "worker.log"
    with run_process(build_worker_command("x"), environment, written, ROOT):
        wait_until(lambda: written.read_text().count("Cannot connect to") > 1, "it reports two missing settings")
        result = written.read_text().splitlines()  # Celery's last word, when it is ended, is text
    lines = [json.loads(line) for line in result]
    assert all({"timestamp", "level", "logger", "message"} <= set(line) for line in lines)
    assert {line["level"] for line in lines} >= {"ERROR"}
    assert any(line["logger"].startswith("celery") for line in lines)


def test_log_level_limits_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "warning")
    command = build_worker_command("x")
    assert command[command.index("--loglevel") + 1] == "WARNING"
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "loud")
    with pytest.raises(HostSettingError, match=r"MESHBOARD_LOG_LEVEL is 'loud'\. Use debug, info, warning, or error\."):
        build_worker_command("x")


def test_rejects_an_unknown_log_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "xml")
    with pytest.raises(HostSettingError, match=r"MESHBOARD_LOG_FORMAT is 'xml'\. Use text or json\."):
        get_log_format()
