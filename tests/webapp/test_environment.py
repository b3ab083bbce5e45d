"""Settings from the environment: errors name the variable, and the docs list every variable."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.db.backends.postgresql.base import DatabaseWrapper

from manual.reference import PAGES
from tests.support.processes import ROOT, base_environment
from webapp.checks import describe_unknown_variables
from webapp.environment import RunnerSettings, SettingError, WebSettings, read_settings
from webapp.runner import build_host_environment

PROVIDED = {"MESHBOARD_SECRET_KEY": "secret", "MESHBOARD_REDIS_URL": "redis://127.0.0.1:1/0"}


@pytest.fixture(autouse=True)
def _clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (RunnerSettings, WebSettings):
        for name in table.model_fields:
            monkeypatch.delenv(f"MESHBOARD_{name.upper()}", raising=False)
    for name, value in PROVIDED.items():
        monkeypatch.setenv(name, value)


def test_passes_database_options_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgres://user:p%40ss%2Fword@db.example:6432/board?sslmode=require&connect_timeout=7"
    monkeypatch.setenv("MESHBOARD_DATABASE_URL", url)
    settings = read_settings(WebSettings).get_database()
    wrapper = DatabaseWrapper({"TIME_ZONE": None, **settings})
    requested = wrapper.get_connection_params()
    stored = {k: requested[k] for k in ("user", "password", "host", "port", "dbname", "sslmode", "connect_timeout")}
    assert stored == {
        "user": "user",
        "password": "p@ss/word",
        "host": "db.example",
        "port": 6432,
        "dbname": "board",
        "sslmode": "require",
        "connect_timeout": 7,
    }


def test_uses_sqlite_without_a_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_STATE_DIR", "/srv/board")
    found = read_settings(WebSettings).get_database()
    assert (found["ENGINE"], found["NAME"]) == ("django.db.backends.sqlite3", "/srv/board/db.sqlite3")
    assert found["OPTIONS"]["transaction_mode"] == "IMMEDIATE"


@pytest.mark.parametrize(
    ("name", "value", "content"),
    [
        ("HTTPS", "maybe", "should be a valid boolean.*'maybe'"),
        ("DEBUG", "2", "should be a valid boolean.*'2'"),
        ("SECRET_KEY", "", "is not set"),
        ("DATABASE_URL", "mysql://u:hunter2@h/db", "expected postgres://"),
        ("DATABASE_URL", "postgres://u:hunter2@h:port/db", "expected postgres://"),
        ("DATABASE_URL", "postgres://u:hunter2/x@h/db", "expected postgres://"),
        ("DATABASE_URL", "postgres://u:hunter2@h", "expected postgres://"),
        ("DATABASE_URL", "postgres://u:hunter2@[h/db", "expected postgres://"),
        ("REDIS_FOR_HOSTS", "hunter2", "expected redis://"),
        ("REDIS_FOR_HOSTS", "unix:///run/redis?password=hunter2", "expected redis://"),
        ("REDIS_URL", "hunter2", "expected redis://"),
        ("REDIS_URL", "http://board:hunter2@h", "expected redis://"),
        ("REDIS_URL", "redis://board:hunter2@h:port/0", "expected redis://"),
        ("REDIS_URL", "redis://board:hunter2@h:6379/zero", "expected redis://"),
        ("REDIS_URL", "redis://board:hunter2#1@h:6379/0", "expected redis://"),
        ("REDIS_URL", "redis://:hunter2@[h:6379/0", "expected redis://"),
        ("REDIS_FOR_HOSTS", "redis://h:port/0", "expected redis://"),
        ("ALLOWED_HOSTS", "https://board.example", "without https://"),
        ("ALLOWED_HOSTS", "127.0.0.1,board.example:443", "without https://"),
        ("ALLOWED_HOSTS", "*.board.example", "Use .board.example to include subdomains"),
        ("ALLOWED_HOSTS", "böard.example", "expected a host name"),
        ("TRUSTED_PROXIES", "0.0.0.0/0", "includes every address"),
        ("WEBHOOK_NETWORKS", "10.0.0.0/8,::/0", "includes every address"),
        ("WEBHOOK_PORTS", "8443,0", "0 is not a port from 1 to 65535"),
        ("WEBHOOK_PORTS", "8443,x", "x is not a port from 1 to 65535"),
        ("OIDC_URL", "accounts.example", "expected https://HOST"),
        ("OIDC_URL", "http://accounts.example", "expected https://HOST"),
        ("BOARD_URL", "board.example", "expected https://HOST"),
        ("EMAIL_HOST", "mail.example:587", "without port \\(see MESHBOARD_EMAIL_PORT\\)"),
        ("EMAIL_FROM", "Board <board@mail.example>", "a mail address such as"),
        ("METRICS_TOKEN", "hunter2", "expected 16 or more ASCII characters"),
        ("METRICS_TOKEN", "hunter2 hunter2 hunter2", "without spaces"),
        ("OTLP_HEADERS", "hunter2", "expected name=value pairs"),
        ("OTLP_HEADERS", "x-token=hunter2,tenant", "expected name=value pairs"),
        ("LEASE_S", "9" * 12, "less than or equal"),
        ("SAVE_S", "9" * 12, "less than or equal"),
        ("STATE_DIR", "/dev/null", "the path is not a folder"),
        ("HISTORY_DIR", "/dev/null", "the path is not a folder"),
    ],
)
def test_names_invalid_settings_without_passwords(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, content: str
) -> None:
    monkeypatch.setenv(f"MESHBOARD_{name}", value)
    with pytest.raises(SettingError, match=f"^MESHBOARD_{name}:? .*{content}") as error:
        read_settings(WebSettings)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "lacking"),
    [
        ("OIDC_URL", "https://accounts.example", "OIDC_CLIENT_ID"),
        ("OIDC_CLIENT_ID", "board", "OIDC_URL"),
        ("OIDC_CLIENT_SECRET", "hunter2", "OIDC_URL"),
        ("EMAIL_HOST", "mail.example", "BOARD_URL"),
        ("EMAIL_USER", "board", "EMAIL_PASSWORD"),
        ("EMAIL_PASSWORD", "hunter2", "EMAIL_USER"),
        ("OTLP_HEADERS", "x-token=hunter2", "OTLP_ENDPOINT"),
    ],
)
def test_names_a_missing_second_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str, lacking: str) -> None:
    monkeypatch.setenv(f"MESHBOARD_{name}", value)
    with pytest.raises(
        SettingError, match=f"MESHBOARD_{name} is set, but MESHBOARD_{lacking} is not. Set both."
    ) as error:
        read_settings(WebSettings)
    assert "hunter2" not in str(error.value)


def test_accepts_a_provider_address_with_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's address must not contain two slashes."""
    monkeypatch.setenv("MESHBOARD_OIDC_URL", "https://accounts.example/tenant/")
    monkeypatch.setenv("MESHBOARD_OIDC_CLIENT_ID", "board")
    assert [app["settings"] for app in read_settings(WebSettings).get_oidc_apps()] == [
        {"server_url": "https://accounts.example/tenant"}
    ]


def test_parses_lists_and_expands_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_ALLOWED_HOSTS", "board.example, [::1],")
    monkeypatch.setenv("MESHBOARD_SECRET_KEY_FALLBACKS", "one, two,")
    monkeypatch.setenv("MESHBOARD_STATE_DIR", "~/board")
    found = read_settings(WebSettings)
    assert found.allowed_hosts == ["board.example", "[::1]"]
    assert [key.get_secret_value() for key in found.secret_key_fallbacks or []] == ["one", "two"]
    assert found.state_dir == Path.home() / "board"


@pytest.mark.parametrize(
    ("wrong", "content"),
    [("0", "greater than or equal to 1"), ("65536", "less than or equal to 65535"), ("http", "a valid integer")],
)
def test_names_an_invalid_port(monkeypatch: pytest.MonkeyPatch, wrong: str, content: str) -> None:
    monkeypatch.setenv("MESHBOARD_PORT", wrong)
    with pytest.raises(SettingError, match=f"^MESHBOARD_PORT: input should be {content}.*, got '{wrong}'"):
        read_settings(RunnerSettings)


@pytest.mark.parametrize("wrong", ["lots", "-1", "0", "1 gb", "1tb", "1gb\nrequirepass x"])
def test_names_an_invalid_redis_limit(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("MESHBOARD_REDIS_MAXMEMORY", wrong)
    with pytest.raises(SettingError, match=r"^MESHBOARD_REDIS_MAXMEMORY: "):
        read_settings(RunnerSettings)


def test_command_names_all_missing_settings(tmp_path: Path) -> None:
    environment = {**base_environment(), "MESHBOARD_STATE_DIR": str(tmp_path), "MESHBOARD_DEBUG": "yes please"}
    argv = [sys.executable, "manage.py", "check"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert [line.rpartition("ImproperlyConfigured: ")[2].split(" ")[0] for line in done.stderr.splitlines()[-3:]] == [
        "MESHBOARD_SECRET_KEY",
        "MESHBOARD_DEBUG:",
        "MESHBOARD_REDIS_URL",
    ]


def test_suggests_a_similar_setting() -> None:
    content = describe_unknown_variables(
        ["MESHBOARD_TRUSTED_PROXY", "MESHBOARD_BOARD_URL_FILE", "MESHBOARD_XYZ", "MESHBOARD_HTTPS", "HOME"]
    )
    assert content == [
        "MESHBOARD_BOARD_URL_FILE is not a setting, so Meshboard ignores it. "
        "MESHBOARD_BOARD_URL is not a secret, so it cannot be read from a file.",
        "MESHBOARD_TRUSTED_PROXY is not a setting, so Meshboard ignores it. Did you mean MESHBOARD_TRUSTED_PROXIES?",
        "MESHBOARD_XYZ is not a setting, so Meshboard ignores it.",
    ]


def test_knows_all_settings_in_docs_and_compose() -> None:
    files = [
        ROOT / "docker-compose.yml",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("ci/*/*"),
        *ROOT.glob("client/**/*.py"),
    ]
    named = {name for file in files for name in re.findall(r"MESHBOARD_[A-Z][A-Z_]*[A-Z]", file.read_text())}
    ours = {"MESHBOARD_PATIENCE", "MESHBOARD_RANKS"}  # of tests, and of the command of a script
    assert describe_unknown_variables(named - ours) == []


def documented() -> set[str]:
    """Return the variables in the tables of the two pages of settings."""
    text = PAGES["reference/settings.md"]() + (ROOT / "docs/reference/host-settings.md").read_text()
    return set(re.findall(r"^\| (?:`|<code>)(MESHBOARD_\w+)(?:`|</code>) \|", text, re.M))


def test_docs_list_all_variables() -> None:
    # Exceptions are internal cookies of processes and words between services, and a prefix.
    of_our_own = {"MESHBOARD_ATTEMPT", "MESHBOARD_RUNS", "MESHBOARD_COMPARE", "MESHBOARD_TELEMETRY", "MESHBOARD_SLURM"}
    of_our_own |= {"MESHBOARD_TERM_FROM_PARENT", "MESHBOARD_RUN_NAME", "MESHBOARD_METER_PACKAGES"}
    of_our_own |= {"MESHBOARD_RUN_LOCK", "MESHBOARD_RANKS"}  # between host processes, and of the command of a script
    sources = [f for room in ("webapp", "workers", "jobs") for f in (ROOT / room).rglob("*.py")]
    text = "\n".join(f.read_text() for f in [*sources, ROOT / "docker-compose.yml", ROOT / "Dockerfile"])
    read_somewhere = set(re.findall(r"MESHBOARD_[A-Z][A-Z_]*[A-Z]", text)) - of_our_own
    assert sorted(read_somewhere - documented()) == []
    known = {f"MESHBOARD_{name.upper()}" for table in (WebSettings, RunnerSettings) for name in table.model_fields}
    assert sorted(documented() - known - read_somewhere) == []


def test_make_up_passes_all_host_settings(tmp_path: Path) -> None:
    text = (ROOT / "workers/host/settings.py").read_text()
    from_the_board = {"MESHBOARD_REDIS_URL", "MESHBOARD_HOST_KEY", "MESHBOARD_URL"}  # set when the host joins
    names = set(re.findall(r"MESHBOARD_[A-Z][A-Z_]*[A-Z]", text)) - from_the_board
    handed = build_host_environment(tmp_path, dict.fromkeys(names, "given"))
    assert {name: handed.get(name) for name in names} == dict.fromkeys(names, "given")
