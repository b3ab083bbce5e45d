"""What a run's most memory is counted from."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import ROOT

PROGRAM = """
import torch
from workers.torch_private.optimizers import AdamW
from workers.trainer import __main__
from workers.trainer.peak import Peak, load_libraries

load_libraries(sharded=True)
peak = Peak(torch.device("cpu"))
import workers.trainer.parallel.zero
AdamW([torch.zeros(1, requires_grad=True)])
print(peak.read())
"""


def test_libraries_that_training_imports_are_not_its_memory() -> None:
    """FSDP2's came after the count had begun: 45 MiB of each rank that shards."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 2**20
