"""What a run's most memory is counted from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


ASIDE = """
import torch
from workers.trainer.allocator import return_large_tensors
from workers.trainer.peak import Peak

return_large_tensors()
peak = Peak(torch.device("cpu"))
own = torch.ones(32 * 2**18)
peak.pause()
kept, of_a_library, gone = (torch.ones(n * 2**18) for n in (64, 48, 128))
del gone
peak.resume(kept.numel() * kept.element_size())
print(peak.read() / 2**20)
peak.pause()
del kept
peak.resume(0)
more = torch.ones(8 * 2**18)
print(peak.read() / 2**20)
"""


def test_what_a_proof_holds_keeps_and_leaves_to_libraries_is_not_training_s() -> None:
    done = subprocess.run([sys.executable, "-c", ASIDE], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 31 < before < 36
    assert 39 < after < 44


VERIFIED = """
import sys
from pathlib import Path

import torch

from tests.parity.cases import SIZES, make_spec, write_data
from tests.parity.rank import make_trainer
from workers.meter import Recorder
from workers.trainer.allocator import return_large_tensors
from workers.trainer.loop import train
from workers.trainer.peak import Peak
from workers.trainer.proof import Proof

torch.set_num_threads(1)
return_large_tensors()
write_data(Path(sys.argv[1]))
SIZES["llama"] |= {"hidden_size": 512, "ffn_hidden_size": 1408}
spec = make_spec("llama", {}, 1, train={"steps": 5, "eval_every": 0, "verify": sys.argv[2]})
peak, said = Peak(torch.device("cpu")), []
trainer = make_trainer(spec, Path(sys.argv[1]), Recorder(0))
train(trainer, said.append, lambda _line: None, watch=Proof(trainer, said.append, lambda _line: None), peak=peak)
print([item["peak_bytes"] for item in said if item["kind"] == "verdict"][0])
"""


@pytest.mark.slow
def test_what_one_process_computes_beside_a_run_is_not_its_memory(tmp_path: Path) -> None:
    """It was: 601 MB where training held 218, as kept gradients and in a heap that glibc kept."""

    def peak(verify: str) -> int:
        argv = [sys.executable, "-c", VERIFIED, str(tmp_path), verify]
        return int(subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert abs(peak("on") / peak("off") - 1) < 0.15
