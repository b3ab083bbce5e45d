"""The host worker's log as JSON: every line that it writes, from the first on, Celery's and warnings too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import ROOT, base_environment, running, wait_until
from webapp.runner import find_free_port
from workers.host.join import worker_command
from workers.host.settings import SettingError
from workers.host.worklog import NAME, log_format


def test_each_line_of_the_worker_is_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose Redis is away has much to say."""
    monkeypatch.setenv(NAME, "json")
    environment = {
        **base_environment(),
        NAME: "json",
        "MESHBOARD_REDIS_URL": f"redis://127.0.0.1:{find_free_port()}/0",
        "MESHBOARD_HOST_KEY": "00" * 32,
        "MESHBOARD_STATE_DIR": str(tmp_path),
        "MESHBOARD_SANDBOX": "off",
    }
    written = tmp_path / "worker.log"
    with running(worker_command("x"), environment, written, ROOT):
        wait_until(lambda: written.read_text().count("Cannot connect to") > 1, "it tells twice what it misses")
        told = written.read_text().splitlines()  # Celery's last word, when it is ended, is text
    lines = [json.loads(line) for line in told]
    assert all({"timestamp", "level", "logger", "message"} <= set(line) for line in lines)
    assert {line["level"] for line in lines} >= {"ERROR"}
    assert any(line["logger"].startswith("celery") for line in lines)


def test_another_form_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "xml")
    with pytest.raises(SettingError, match=r"MESHBOARD_LOG_FORMAT is 'xml'\. Use text or json\."):
        log_format()
