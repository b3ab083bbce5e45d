"""An AdamW without torch's compiler is torch's AdamW."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.support.processes import base_environment
from tests.support.ranks import run_to_end
from webapp.runner import free_port
from workers.torch_private.optimizers import AdamW

TRAINS = """
import sys
from workers.trainer.__main__ import main
sys.argv[1:] = ["--spec", sys.argv[1], "--data-root", "."]
code = main()
print(*(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules), "end")
sys.exit(code)
"""


def test_it_computes_keeps_and_loads_what_torch_s_own_does() -> None:
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)] for _ in range(2))
    made = [
        kind(own, lr=0.1, weight_decay=0.2, fused=True) for kind, own in ((AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for step in range(3):
        for optimizer, own in zip(made, (ours, theirs), strict=True):
            for parameter in own:
                parameter.grad = torch.full_like(parameter, 0.5 - step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(parameter.grad is None and not parameter.grad_fn for parameter in ours)
    kept, expected = (optimizer.state_dict() for optimizer in made)
    assert str(kept) == str(expected)
    made[0].load_state_dict(expected)
    assert str(made[0].state_dict()) == str(expected)


def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    """Most of a second of each rank's start: whoever brings it back sees it here."""
    spec = tmp_path / "spec.json"
    spec.write_text('{"model": {"preset": "gpt-tiny"}, "train": {"steps": 2, "global_batch": 2, "seq_len": 32}}')
    argv = [sys.executable, "-c", TRAINS, str(spec)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_to_end(argv, {**base_environment(), **alone})
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert done.stdout.splitlines()[-1] == "end"
