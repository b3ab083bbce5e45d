"""`make up` with wrong settings and a used port, and Django's deployment checks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, base_environment, scale_timeout
from webapp.processes import ProcessManager, Service
from webapp.runner import (
    LOGIN_LINK_MINUTES,
    StartError,
    build_host_environment,
    build_web_environment,
    choose_redis_port,
    describe_isolation,
    find_free_port,
    get_redis_url,
    runs_own_redis,
    wait_for_redis,
    wait_for_web,
)


def up(state: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**base_environment(), "MESHBOARD_STATE_DIR": str(state), **settings}
    argv = [sys.executable, "-m", "webapp.runner"]
    return subprocess.run(
        argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=scale_timeout(60), check=False
    )


def test_does_not_start_on_a_used_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = up(tmp_path / "var", MESHBOARD_PORT=str(port))
    assert ended.returncode == 1
    assert f"Another program uses port {port}. Set MESHBOARD_PORT to another port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_reports_invalid_settings_without_a_traceback(tmp_path: Path) -> None:
    ended = up(tmp_path / "var", MESHBOARD_PORT="http")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("meshboard: MESHBOARD_PORT: ")


def test_reports_an_unreachable_redis_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="Redis did not answer in 0 s"):
        wait_for_redis("redis://127.0.0.1:1/0", tmp_path, timeout_s=0.1)


LATE = "import socket, time; time.sleep(1); s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"


def test_waits_for_a_web_server_that_starts_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, manager = find_free_port(), ProcessManager(tmp_path)
    monkeypatch.setattr("webapp.runner.SLOW_START_S", 0.2)
    manager.start(Service("web", [sys.executable, "-c", LATE.format(port=port)], dict(os.environ), tmp_path))
    try:
        with pytest.raises(StartError, match=r"The web server did not answer in 0 s\. Read .*web\.log"):
            wait_for_web(port, manager, timeout_s=0.1)
        wait_for_web(port, manager)
    finally:
        manager.stop(["web"])
    assert "The web server is still starting. Meshboard waits for up to 180 s." in capsys.readouterr().out
    with pytest.raises(StartError, match="The web server did not start"):
        wait_for_web(port, manager)


def test_redis_keeps_its_port_or_reports_a_new_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = choose_redis_port(tmp_path)
    assert choose_redis_port(tmp_path) == port
    assert capsys.readouterr().out == ""
    with socket.socket() as stranger:
        # connections of another process may remain there
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        moved = choose_redis_port(tmp_path)
    output = capsys.readouterr().out
    assert f"Another program uses port {port} of Redis, so Redis uses {moved}." in output
    assert choose_redis_port(tmp_path) == moved != port


def test_prints_the_lifetime_of_the_login_link(settings: Any) -> None:
    assert LOGIN_LINK_MINUTES * 60 == settings.SESAME_MAX_AGE


def test_deployment_checks_pass(tmp_path: Path) -> None:
    environment = {
        **base_environment(),
        "MESHBOARD_SECRET_KEY": "a" * 20 + "0123456789" * 5,
        "MESHBOARD_REDIS_URL": "redis://127.0.0.1:1/0",
        "MESHBOARD_STATE_DIR": str(tmp_path),
    }
    argv = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WITHOUT = [
    ("meshboard-manage", ["torch", "redis", "pydantic"], "pip install 'meshboard[web]'"),
    ("meshboard-up", ["torch", "redis", "pydantic"], "pip install 'meshboard[web]'"),
    ("meshboard-up", ["django", "redis", "pydantic"], "pip install 'meshboard[worker]'"),
    ("meshboard-up", ["pydantic"], "pip install 'meshboard[web,worker]'"),
]


@pytest.mark.parametrize(("command", "packages", "words"), WITHOUT)
def test_names_the_missing_extra(command: str, packages: list[str], words: str, tmp_path: Path) -> None:
    for package in packages:
        spec = find_spec(package)
        assert spec
        assert spec.origin
        (tmp_path / package).symlink_to(Path(spec.origin).parent)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[command].partition(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    argv = [sys.executable, "-S", "-c", program, "help"]  # -S: only the packages above are on the path
    ended = subprocess.run(
        argv, env={**base_environment(), **path}, capture_output=True, text=True, timeout=scale_timeout(30), check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"{command}: ")
    assert words in ended.stderr


def environments(state: Path) -> tuple[dict[str, str], dict[str, str]]:
    web = build_web_environment(state)
    return web, build_host_environment(state, web)


def test_secret_file_replaces_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://127.0.0.1:1/0\n")
    for name in ("MESHBOARD_SECRET_KEY", "MESHBOARD_REDIS_URL"):
        monkeypatch.setenv(name, "")  # equivalent to an unset variable
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / "url"))
    web, _ = environments(tmp_path)
    assert {"MESHBOARD_SECRET_KEY", "MESHBOARD_REDIS_URL"}.isdisjoint(web)
    assert not runs_own_redis()
    assert get_redis_url(web) == "redis://127.0.0.1:1/0"
    monkeypatch.delenv("MESHBOARD_REDIS_URL_FILE")
    assert environments(tmp_path)[0]["MESHBOARD_REDIS_URL"].startswith("redis://:")
    assert runs_own_redis()


def test_passes_the_log_format_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_LOG_FORMAT", "json")
    assert [content["MESHBOARD_LOG_FORMAT"] for content in environments(tmp_path)] == ["json", "json"]


def test_reports_gpus_hidden_from_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webapp.runner.count_gpus", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _, host = environments(tmp_path)
    with pytest.raises(StartError, match="CUDA_VISIBLE_DEVICES is '3', but jobs use GPUs 0 to 7"):
        describe_isolation(host)
