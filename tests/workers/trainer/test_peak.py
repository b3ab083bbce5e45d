"""What a run's most memory is counted from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

IMPORTED = """
import json
import os
import sys
from pathlib import Path

from tests.parity.cases import make_spec, write_data
from webapp.runner import free_port
from workers.meter import Recorder
from workers.trainer import __main__, peak


class Noted(peak.Peak):
    def __init__(self, device):
        super().__init__(device)
        self.before = set(sys.modules)
        noted.append(self)


def rank(index, spec):
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index)}
    __main__.run(spec, index, Path(sys.argv[1]), Recorder(index), None, None)
    Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(sorted(set(sys.modules) - noted[0].before)))


write_data(Path(sys.argv[1]))
noted, __main__.Peak = [], Noted
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
for arch, layout in (("llama", {"dp": 2, "zero": 1}), ("llama", {"pp": 2}), ("moe", {"dp": 2, "ep": 2})):
    os.environ["MASTER_PORT"] = str(free_port())
    ranks = []
    for index in range(2):
        if (pid := os.fork()) == 0:
            rank(index, make_spec(arch, layout, 2, train={"steps": 2, "eval_every": 0, "verify": "off"}))
            os._exit(0)
        ranks.append(pid)
    assert not any([os.waitpid(pid, 0)[1] for pid in ranks])
"""
FEW_MODULES = 4  # of the profiler, a few KiB each


@pytest.mark.slow
def test_what_training_imports_is_there_before_its_memory_is_counted(tmp_path: Path) -> None:
    """FSDP2 was not, and the compiler and sympy, which torch imports for experts, ZeRO and pipes: 35 to 80 MiB of each
    rank that shared a plan's 80 to 280."""
    argv = [sys.executable, "-W", "ignore", "-c", IMPORTED, str(tmp_path)]
    subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(found) == 6
    assert max(map(len, found)) <= FEW_MODULES, max(found, key=len)


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
