"""A real Prometheus scrapes a live board: every panel of the dashboard answers with data, but those that need GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from jobs.operations.metrics.collection import GPU_METRICS
from tests.support.processes import ROOT, RedisServer, run_process, scale_timeout, wait_until
from tests.support.web import run_site
from webapp.runner import find_free_port

TOKEN = "only-for-this-test-0123456789"
PANELS = json.loads((ROOT / "deploy/grafana/meshboard.json").read_text())["panels"]
FILL = """
import os, sys, django
django.setup()
import redis
from django.contrib.auth.models import User
from tests.jobs.metrics.board import board, tell
job = board(User.objects.get(username="owner"))
client = redis.Redis.from_url(os.environ["MESHBOARD_REDIS_URL"])
tell(client, job.id, 1)
print(job.id, flush=True)
for step, _ in enumerate(sys.stdin, 2):
    tell(client, job.id, step)
    print(step, flush=True)
"""
CONFIG = """
global: {{scrape_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: meshboard
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.mark.slow
def test_every_panel_shows_something(redis_service: RedisServer, tmp_path: Path) -> None:
    database, port = f"sqlite:///{tmp_path}/board.sqlite3", find_free_port()
    with run_site(database, redis_service, tmp_path / "web", MESHBOARD_METRICS_TOKEN=TOKEN) as board:
        argv = [sys.executable, "-c", FILL]
        with subprocess.Popen(
            argv, env=board.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as ranks:
            assert ranks.stdin is not None
            assert ranks.stdout is not None
            assert ranks.stdout.readline(), "the board was filled"
            (tmp_path / "token").write_text(TOKEN)
            config = CONFIG.format(
                rules=ROOT / "deploy/prometheus/rules.yml", token=tmp_path / "token", port=board.port
            )
            (tmp_path / "prometheus.yml").write_text(config)
            serve = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"]
            serve += [f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
            with run_process(serve, board.environment, tmp_path / "prometheus.log"):
                scrapes = 0
                while scrapes < 4:  # rates need two, with a step between
                    wait_until(lambda seen=scrapes: _scrapes(port) > seen, "Prometheus scraped", 60)
                    scrapes = _scrapes(port)
                    ranks.stdin.write("step\n")
                    ranks.stdin.flush()
                    assert ranks.stdout.readline()
                without = wait_until(lambda: _without_data(port), "panels answer", 60)
                assert without == [panel["title"] for panel in PANELS if "Needs GPUs" in panel["description"]]
                rules = _asked(port, "rules", {})["groups"][0]["rules"]
                assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            ranks.stdin.close()
            ranks.wait(scale_timeout(20))


def _without_data(port: int) -> list[str]:
    """Titles of panels of which a query answers nothing; [] too while any other than those of GPUs does."""
    empty = [panel["title"] for panel in PANELS if not all(_answers(port, each["expr"]) for each in panel["targets"])]
    of_gpus = [panel["title"] for panel in PANELS if any(name in str(panel["targets"]) for name in GPU_METRICS)]
    return empty if empty == of_gpus else []


def _answers(port: int, expr: str) -> bool:
    """With Grafana's variables filled in as it does."""
    filled = expr.replace("$__rate_interval", "1m").replace("$job", ".*")
    return bool(_asked(port, "query", {"query": filled})["result"])


def _scrapes(port: int) -> int:
    try:
        found = _asked(port, "query", {"query": "count_over_time(meshboard_job_info[5m])"})["result"]
    except (urllib.error.URLError, ConnectionError):
        return 0
    return int(found[0]["value"][1]) if found else 0


def _asked(port: int, what: str, query: dict[str, str]) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)["data"]
