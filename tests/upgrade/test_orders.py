"""A host of the version before reads every spec that asks for nothing new."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from jobs.queue.sent import spec_for_hosts
from planner.facts.parse_spec import parse_spec
from tests.upgrade.older import files_before

READ = """
import json, sys
from planner.facts.parse import parse_spec
told = json.load(sys.stdin)
print(json.dumps([parse_spec(spec).model_dump() for spec in told]))
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
    """What the version before makes of each."""
    folder = files_before(tmp_path_factory.mktemp("older"))
    told = json.dumps([spec_for_hosts(parse_spec(spec).model_dump()) for spec in SPECS.values()])
    argv = [sys.executable, "-c", READ]
    done = subprocess.run(argv, cwd=folder, input=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(SPECS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_a_host_of_the_version_before_reads_what_it_is_sent_as_it_was_meant(read: dict[str, Any], name: str) -> None:
    meant = spec_for_hosts(parse_spec(SPECS[name]).model_dump())
    assert spec_for_hosts(read[name]) == meant


def test_what_is_new_and_says_nothing_is_not_sent() -> None:
    spec = parse_spec(SPECS["a mixture"]).model_dump()
    told = spec_for_hosts(spec)
    assert not {"head_dim", "sliding_window"} & told["model"].keys()
    assert not {"expert_bias", "swiglu_limit"} & told["model"]["moe"].keys()
    assert "software" not in told["resources"]
    assert spec == parse_spec(SPECS["a mixture"]).model_dump(), "what is stored stays whole"
    usual = parse_spec({**RUN, "model": {"preset": "gpt-tiny", "head_dim": 32}}).model_dump()
    assert spec_for_hosts(usual)["model"]["head_dim"] == 32


def test_what_is_new_and_asked_for_is_sent() -> None:
    layout = {"dp": 2, "pp": 2, "zero": 3, "keep_gathered": True}
    train = {"global_batch": 8, "micro_batches": 2}
    told = spec_for_hosts(parse_spec({**RUN, "layout": layout, "train": train}).model_dump())
    assert told["layout"]["keep_gathered"] is True
    assert "document_end" not in told["train"]
