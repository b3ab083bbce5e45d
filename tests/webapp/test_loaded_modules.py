"""Modules that each process holds in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

HEAVY = {"torch", "tensorflow", "transformers", "mlflow"}
SERVES = """
import django
from django.core.management import get_commands, load_command_class
django.setup()
import webapp.asgi, webapp.urls, jobs.planning.planner_tasks
for name, app in get_commands().items():
    if app == "jobs":
        load_command_class(app, name)
"""
WATCHES = "import workers.host.app, workers.host.supervisor.__main__, workers.host.guardian, workers.host.join"


@pytest.mark.parametrize("imports", [SERVES, WATCHES], ids=["what serves", "what watches"])
def test_loads_no_training_library(imports: str, tmp_path: Path) -> None:
    values = {"DJANGO_SETTINGS_MODULE": "tests.settings", "MESHBOARD_REDIS_URL": "redis://127.0.0.1:1"}
    values |= {"MESHBOARD_HOST_KEY": "00" * 32, "MESHBOARD_STATE_DIR": str(tmp_path)}
    source = f"{imports}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    content = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **values},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(json.loads(content.stdout))
    assert len(loaded) > 200
    assert not HEAVY & loaded
