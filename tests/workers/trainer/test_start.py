"""What a rank imports before it trains, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.facts.spec import SpecError
from tests.support.processes import base_environment
from tests.support.ranks import run_to_end
from webapp.runner import free_port
from workers.trainer.__main__ import spec_of

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "sympy",
)
TRAINS = f"""
import sys
from workers.trainer.__main__ import main
sys.argv[1:] = ["--spec", sys.argv[1], "--data-root", sys.argv[2]]
code = main()
print([name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""


def test_a_rank_imports_what_it_needs(tmp_path: Path) -> None:
    """The rest is as much again as all of a rank's start; ZeRO, checkpoints and compiling ask for it."""
    spec = tmp_path / "spec.json"
    spec.write_text('{"model": {"preset": "gpt-tiny"}, "train": {"steps": 2, "global_batch": 2, "seq_len": 32}}')
    argv = [sys.executable, "-c", TRAINS, str(spec), str(tmp_path)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_to_end(argv, {**base_environment(), **alone})
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": {"preset": "gpt-tiny", "sliding_window": 8}}, "model.sliding_window"),
        ({"model": {"preset": "gpt-tiny", "head_dim": 8}}, "model.head_dim"),
        ({"resources": {"device": "cuda", "stack": "megatron"}}, "resources.stack"),
    ],
)
def test_a_rank_refuses_what_it_would_train_otherwise_than_it_was_asked(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    """Whoever starts it: a board refuses the same before it sends it."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"model": {"preset": "gpt-tiny"}, **change}))
    with pytest.raises(SpecError, match=rf"`{field}`: the trainer does not support"):
        spec_of(path, 1)
