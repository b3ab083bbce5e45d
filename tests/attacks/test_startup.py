"""Attacks 31 and 32: settings that a board rejects at its start, and secrets in files."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import SystemCheckError

from jobs.management.commands import controller, recorder
from jobs.management.foreground import Foreground
from tests.support.processes import ROOT, base_environment, scale_timeout
from webapp.checks import check_exposed_board
from webapp.environment import SettingError, WebSettings, read_settings

KEY = secrets.token_urlsafe(48)
REACHABLE = {"MESHBOARD_SECRET_KEY": KEY, "MESHBOARD_ALLOWED_HOSTS": "board.example"}
REDIS = {"MESHBOARD_REDIS_URL": "redis://:password@redis.example:6379/0"}
PRINTED = "only-for-this-step-0123456789-0123456789-0123456789"


def start_process(argv: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = {**base_environment(), **environment}
    argv = [sys.executable, *argv]
    return subprocess.run(
        argv, env=given, cwd=ROOT, capture_output=True, text=True, check=False, timeout=scale_timeout(60)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"MESHBOARD_REDIS_URL": "redis://redis.example:6379/0"},
            "MESHBOARD_REDIS_URL has no password for redis.example",
        ),
        ({**REDIS, "MESHBOARD_SECRET_KEY": PRINTED}, "meshboard.E001"),
    ],
)
def test_31_32_web_reports_in_one_line_why_it_does_not_start(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    done = start_process(["-m", "webapp.serve"], {**REACHABLE, "MESHBOARD_STATE_DIR": str(tmp_path), **change})
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [controller.Command, recorder.Command])
def test_32_controller_and_recorder_do_not_start(settings: Any, command: type[Foreground]) -> None:
    settings.ALLOWED_HOSTS, settings.SECRET_KEY = ["board.example"], PRINTED
    with pytest.raises(SystemCheckError, match=r"meshboard\.E001"):
        command().check()


@pytest.mark.parametrize(
    ("host", "more", "refused"),
    [
        ("db.example", {}, ["meshboard.E002"]),
        ("db.example", {"PASSWORD": "x"}, []),
        ("db.example", {"OPTIONS": {"passfile": "/run/secrets/pgpass"}}, []),
        ("/run/postgresql", {}, []),
        ("127.0.0.1", {}, []),
    ],
)
def test_32_database_on_a_network_needs_a_password(
    settings: Any, monkeypatch: pytest.MonkeyPatch, host: str, more: dict[str, Any], refused: list[str]
) -> None:
    settings.ALLOWED_HOSTS, settings.SECRET_KEY = ["board.example"], KEY
    database = {"ENGINE": "django.db.backends.postgresql", "HOST": host, **more}
    monkeypatch.setitem(settings.DATABASES, "default", database)
    assert [problem.id for problem in check_exposed_board(None)] == refused
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    assert check_exposed_board(None) == [], "the local demo"


def test_32_key_of_the_dockerfile_is_rejected() -> None:
    """The key is in the source, for the build step that needs any key."""
    assert f"MESHBOARD_SECRET_KEY={PRINTED} " in (ROOT / "Dockerfile").read_text()


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in WebSettings.model_fields:
        monkeypatch.delenv(f"MESHBOARD_{name.upper()}", raising=False)
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    return monkeypatch


def test_secret_can_be_read_from_a_file(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "old").write_text("one,two\n")
    (tmp_path / "database").write_text("postgres://board:hunter2@db.example/board\n")
    for name, file in (("SECRET_KEY", "key"), ("SECRET_KEY_FALLBACKS", "old"), ("DATABASE_URL", "database")):
        clean_environment.setenv(f"MESHBOARD_{name}_FILE", str(tmp_path / file))
    found = read_settings(WebSettings)
    assert found.secret_key.get_secret_value() == KEY
    assert [key.get_secret_value() for key in found.secret_key_fallbacks or []] == ["one", "two"]
    assert found.get_database()["PASSWORD"] == "hunter2"


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (None, {}, "SECRET_KEY_FILE is '.*/key', which cannot be read: No such file"),
        (b"\n", {}, "SECRET_KEY_FILE is '.*/key', which is empty"),
        (b"\xff\xfe", {}, "SECRET_KEY_FILE is '.*/key', which cannot be read: not UTF-8 text"),
        (KEY.encode(), {"MESHBOARD_SECRET_KEY": KEY}, "SECRET_KEY and MESHBOARD_SECRET_KEY_FILE are both set"),
    ],
    ids=["none", "empty", "no text", "both"],
)
def test_error_names_an_invalid_secret_file_and_hides_its_content(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, more: dict[str, Any], words: str
) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    clean_environment.setenv("MESHBOARD_SECRET_KEY_FILE", str(tmp_path / "key"))
    for name, value in more.items():
        clean_environment.setenv(name, value)
    with pytest.raises(SettingError, match=f"^MESHBOARD_{words}") as error:
        read_settings(WebSettings)
    assert KEY not in str(error.value)


def test_setting_without_a_secret_has_no_file_variant(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("evil.example")
    clean_environment.setenv("MESHBOARD_SECRET_KEY", KEY)
    clean_environment.setenv("MESHBOARD_ALLOWED_HOSTS_FILE", str(tmp_path / "x"))
    assert read_settings(WebSettings).allowed_hosts == ["127.0.0.1", "localhost"]
