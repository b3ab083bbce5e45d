"""The hook meters the ranks of every launcher, and no other process."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, scale_timeout
from tests.support.ranks import run_to_completion
from tests.workers.meter.launched import STEPS
from tests.workers.meter.test_script_times import Supervisor
from webapp.runner import find_free_port

SCRIPT = str(Path(__file__).with_name("launched.py"))
HOOK = ROOT / "workers" / "meter" / "hook"
PYTHON = sys.executable
RUN = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", SCRIPT)
TORCHRUN = shutil.which("torchrun", path=str(Path(PYTHON).parent)) or "torchrun"
ACCELERATE = (
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
GRADIENT_BYTES = (16 * 16 + 16) * 4


def run(folder: Path, *command: str, python_path: str = "", **changes: str) -> tuple[Supervisor, str]:
    """Run a command with the hook, and return the items of its ranks and its output."""
    supervisor = Supervisor(folder / "s")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), python_path])),
        "MESHBOARD_TELEMETRY": str(folder / "s"),
        "OMP_NUM_THREADS": "1",
        **changes,
    }
    ran = run_to_completion(list(command), environment, cwd=folder, limit_s=scale_timeout(120))
    assert ran.returncode == 0, ran.stderr
    return supervisor, ran.stdout + ran.stderr


def check_ranks(supervisor: Supervisor, ranks: int = 2) -> None:
    """Check the ranks, their steps, and their traffic."""
    assert sorted(supervisor.items) == list(range(ranks))
    for items in supervisor.items.values():
        stages = Counter(item["stage"] for item in items if item["kind"] == "start")
        assert stages["imported"] == 1, "one process per rank"
        assert {item["world_size"] for item in items if item["kind"] == "start"} == {ranks}
        steps: list[Any] = [item for item in items if item["kind"] == "step"]
        assert steps[-1]["step"] == STEPS
        cells = {cell["op"]: cell for cell in steps[-1]["cells"]}
        if ranks > 1:
            assert cells["all_reduce"]["payload_bytes"] == (STEPS - 2) * GRADIENT_BYTES


@pytest.mark.parametrize(
    "command",
    [
        (TORCHRUN, *RUN),
        (PYTHON, SCRIPT, "fork"),
        pytest.param((PYTHON, "-m", "torch.distributed.run", *RUN), marks=pytest.mark.extended),
        pytest.param((PYTHON, SCRIPT, "spawn"), marks=pytest.mark.extended),
        pytest.param((PYTHON, "-m", "torch.distributed.launch", "--use-env", *RUN), marks=pytest.mark.extended),
        pytest.param(("env", "X=1", TORCHRUN, *RUN), marks=pytest.mark.extended),
        pytest.param(("bash", "-c", 'exec "$0" "$@"', TORCHRUN, *RUN), marks=pytest.mark.extended),
    ],
    ids=["torchrun", "fork", "run", "spawn", "launch", "env", "bash"],
)
def test_meters_each_rank_once(tmp_path: Path, command: tuple[str, ...]) -> None:
    if command[-1] in ("fork", "spawn"):
        command = (*command, str(find_free_port()))
    supervisor, output = run(tmp_path, *command)
    check_ranks(supervisor)
    assert "not metered" not in output


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed", "uv"])
def test_meters_ranks_of_other_packages(tmp_path: Path, launcher: str) -> None:
    commands = {
        "accelerate": (PYTHON, "-m", "accelerate.commands.launch", *ACCELERATE, SCRIPT),
        "deepspeed": (PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank", SCRIPT),
        "uv": ("uv", "run", "--no-project", "--python", PYTHON, TORCHRUN, *RUN),
    }
    if launcher == "uv":
        if shutil.which("uv") is None:
            pytest.skip("uv is not installed")
    else:
        pytest.importorskip(launcher)
    supervisor, _ = run(tmp_path, *commands[launcher], DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    check_ranks(supervisor)


@pytest.mark.extended
def test_script_without_groups_is_rank_0(tmp_path: Path) -> None:
    supervisor, _ = run(tmp_path, PYTHON, SCRIPT)
    check_ranks(supervisor, ranks=1)


@pytest.mark.extended
def test_second_process_of_a_rank_is_not_metered(tmp_path: Path) -> None:
    both = f"{PYTHON} {SCRIPT} & {PYTHON} {SCRIPT}; wait"
    supervisor, output = run(tmp_path, "bash", "-c", both)
    stages = Counter(item["stage"] for item in supervisor.items[0] if item["kind"] == "start")
    assert stages["imported"] + output.count("is not metered, because another process is rank 0") == 2


def test_process_that_is_no_rank_loads_nothing(tmp_path: Path) -> None:
    """The hook also runs the user's own `sitecustomize`, and imports no package."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.own = 'user'\n")
    loaded = "{'torch', 'workers', 'contracts', 'pydantic', 'importlib.util', 'typing'} & set(sys.modules)"
    code = f"import sys; print(sys.own, 'meshboard_hook' in sys.modules, {loaded} or 'nothing')"
    supervisor, output = run(tmp_path, PYTHON, "-S", "-c", f"import sitecustomize; {code}", python_path=str(own))
    assert output == "user True nothing\n"
    assert not supervisor.items


@pytest.mark.parametrize("option", ["-I", "-E"])
def test_isolated_python_has_no_hook(tmp_path: Path, option: str) -> None:
    _, output = run(tmp_path, PYTHON, option, "-c", "import sys; print('meshboard_hook' in sys.modules)")
    assert output == "False\n"


@pytest.mark.extended
def test_package_with_a_name_of_meshboard_stays(tmp_path: Path) -> None:
    """The meter imports its own packages, and the script imports the packages of the user."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").write_text("OWN = 1\n")
    program = Path(SCRIPT).read_text().replace("import torch\n", "import torch\nimport workers\n", 1)
    (tmp_path / "train.py").write_text(f"{program}    from workers import OWN\n    print('own package', OWN)\n")
    supervisor, output = run(tmp_path, PYTHON, "train.py")
    assert "own package 1" in output
    check_ranks(supervisor, ranks=1)


def test_hook_reports_an_environment_that_cannot_load_the_meter(tmp_path: Path) -> None:
    """A script runs to its end in a Python that lacks a package of the meter."""
    (tmp_path / "pydantic.py").write_text("raise ImportError('no pydantic here')\n")
    code = "import meshboard\nwith meshboard.step():\n    print('step')\n"
    supervisor, output = run(tmp_path, PYTHON, "-c", code, python_path=str(tmp_path))
    assert "meshboard: this process is not metered: ImportError: no pydantic here" in output
    assert output.startswith("step")
    assert not supervisor.items
