"""Grafana dashboard with the data that Prometheus scrapes from a running board."""

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
from tests.jobs.metrics.board import fill_board, send_step
job = fill_board(User.objects.get(username="owner"))
client = redis.Redis.from_url(os.environ["MESHBOARD_REDIS_URL"])
send_step(client, job.id, 1)
print(job.id, flush=True)
for step, _ in enumerate(sys.stdin, 2):
    send_step(client, job.id, step)
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
def test_every_panel_without_gpus_has_data(redis_service: RedisServer, tmp_path: Path) -> None:
    database, port = f"sqlite:///{tmp_path}/board.sqlite3", find_free_port()
    with run_site(database, redis_service, tmp_path / "web", MESHBOARD_METRICS_TOKEN=TOKEN) as fill_board:
        argv = [sys.executable, "-c", FILL]
        with subprocess.Popen(
            argv, env=fill_board.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as ranks:
            assert ranks.stdin is not None
            assert ranks.stdout is not None
            assert ranks.stdout.readline(), "the board is filled"
            (tmp_path / "token").write_text(TOKEN)
            config = CONFIG.format(
                rules=ROOT / "deploy/prometheus/rules.yml", token=tmp_path / "token", port=fill_board.port
            )
            (tmp_path / "prometheus.yml").write_text(config)
            serve = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"]
            serve += [f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
            with run_process(serve, fill_board.environment, tmp_path / "prometheus.log"):
                scrapes = 0
                while scrapes < 4:  # A rate needs two scrapes with a step between them.
                    wait_until(lambda old=scrapes: _count_scrapes(port) > old, "Prometheus scrapes the board", 60)
                    scrapes = _count_scrapes(port)
                    ranks.stdin.write("step\n")
                    ranks.stdin.flush()
                    assert ranks.stdout.readline()
                empty = wait_until(lambda: _list_empty_panels(port), "all panels without GPUs have data", 60)
                assert empty == [panel["title"] for panel in PANELS if "Needs GPUs" in panel["description"]]
                rules = _query(port, "rules", {})["groups"][0]["rules"]
                assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            ranks.stdin.close()
            ranks.wait(scale_timeout(20))


def _list_empty_panels(port: int) -> list[str]:
    """Return the titles of panels without data, or nothing while a panel without GPUs is among them."""
    empty = [panel["title"] for panel in PANELS if not all(_has_data(port, each["expr"]) for each in panel["targets"])]
    of_gpus = [panel["title"] for panel in PANELS if any(name in str(panel["targets"]) for name in GPU_METRICS)]
    return empty if empty == of_gpus else []


def _has_data(port: int, expr: str) -> bool:
    """Return whether a query has data, with the variables of Grafana replaced."""
    filled = expr.replace("$__rate_interval", "1m").replace("$job", ".*")
    return bool(_query(port, "query", {"query": filled})["result"])


def _count_scrapes(port: int) -> int:
    try:
        found = _query(port, "query", {"query": "count_over_time(meshboard_job_info[5m])"})["result"]
    except (urllib.error.URLError, ConnectionError):
        return 0
    return int(found[0]["value"][1]) if found else 0


def _query(port: int, what: str, query: dict[str, str]) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as response:
        return json.load(response)["data"]
