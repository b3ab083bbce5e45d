"""Check that a host of the previous version reads specs of this version."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from jobs.queue.orders import spec_for_hosts
from planner.facts.parse_spec import parse_spec
from tests.upgrade.services import export_older_version

READ = """
import json, sys
from planner.facts.parse_spec import parse_spec
orders = json.load(sys.stdin)
print(json.dumps([parse_spec(spec).model_dump() for spec in orders]))
"""
RUN: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"steps": 7}}
SPECS: dict[str, dict[str, Any]] = {
    "training": {**RUN, "resources": {"labels": ["a"]}, "run": {"time_limit_s": 60}, "retry": {"max_attempts": 2}},
    "a mixture": {**RUN, "model": {"preset": "mixtral-tiny"}, "layout": {"dp": 2, "ep": 2, "zero": 1}},
    "a dry run": {**RUN, "kind": "dry_run", "dry_ranks": [1]},
    "a script": {"kind": "script", "script": {"path": "train.py"}, "layout": {"dp": 2}},
    "a lab": {"kind": "lab", "layout": {"dp": 2}, "lab": {"primitives": ["all_reduce"]}},
    "a calibration": {"kind": "calibrate", "layout": {"dp": 2}, "resources": {"host": "anna"}},
    "on Slurm": {**RUN, "resources": {"engine": "slurm", "slurm": {"nodes": 2}}},
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the specs that the previous version reads."""
    folder = export_older_version(tmp_path_factory.mktemp("older"))
    result = json.dumps([spec_for_hosts(parse_spec(spec).model_dump()) for spec in SPECS.values()])
    argv = [sys.executable, "-c", READ]
    done = subprocess.run(argv, cwd=folder, input=result, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(SPECS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_host_of_the_previous_version_reads_current_specs(read: dict[str, Any], name: str) -> None:
    meant = spec_for_hosts(parse_spec(SPECS[name]).model_dump())
    assert spec_for_hosts(read[name]) == meant
