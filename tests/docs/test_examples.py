"""The files in examples/, which the documentation uses in its commands, work."""

from __future__ import annotations

import re
import subprocess
import sys

import yaml

from planner.facts.parse_spec import parse_spec
from tests.support.processes import ROOT, scale_timeout

EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "docs/howto/own-script.md"


def test_guide_shows_the_example_script() -> None:
    shown = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert shown is not None
    assert shown[1] == (EXAMPLES / "train.py").read_text()


def test_meter_prints_the_traffic_of_the_example_script() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "workers.meter", "examples/train.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scale_timeout(120), check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Rank 0 after 20 optimizer steps." in ran.stderr
    assert re.search(r"^step +world +all_reduce +18 ", ran.stderr, re.M)


def test_example_spec_is_valid() -> None:
    spec = parse_spec(yaml.safe_load((EXAMPLES / "spec.yaml").read_text()))
    assert spec.layout.world_size == 4
