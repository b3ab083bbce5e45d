"""Run public training scripts with and without the meter, and compare losses, step times, and CPU time.

`make scripts SCRIPTS=FOLDER` reads checkouts that you fetched into FOLDER: nanoGPT, minGPT, examples (of pytorch), and
accelerate. Set SCRIPTS_PYTHON to a Python with the packages of the scripts. The scripts are unmodified and run on the
CPU. For the examples that expect GPUs, a `sitecustomize` module replaces `torch.accelerator` by a CPU.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from contracts.codec import decode_frame
from contracts.telemetry.items import list_step_times
from workers.host.hook import build_hook_variables

TIMEOUT_S = 900
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
SHAKESPEARE = "examples/distributed/minGPT-ddp/mingpt/data/input.txt"
CPU_ACCELERATOR = """
import sys
from importlib.abc import MetaPathFinder

class AfterTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "log_utils":
            import torch
            torch.accelerator.is_available = lambda: True
            torch.accelerator.device_count = lambda: 8
            torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
        return None

sys.meta_path.insert(0, AfterTorch())
"""


class Case(NamedTuple):
    """A script, how it prints its losses, and how it prints the milliseconds of some steps."""

    name: str
    launcher: str
    folder: str
    command: tuple[str, ...]
    loss: str = r"loss:? ([\d.]+)"
    step_ms: str = ""
    printed_every: int = 1
    prepare: Callable[[Path], None] = lambda _folder: None
    fakes_accelerator: bool = False


class Result(NamedTuple):
    """Printed losses and step times of a run, its CPU seconds, and the items of its ranks."""

    losses: list[str]
    step_ms: list[float]
    cpu_s: float
    items: dict[int, list[Any]]


def prepare_shakespeare(folder: Path) -> None:
    """Write the characters of a text as nanoGPT's data, without a download."""
    target = folder / "nanoGPT/data/shakespeare_char"
    shutil.copy(folder / SHAKESPEARE, target / "input.txt")
    subprocess.run([get_python(), "prepare.py"], cwd=target, check=True, stdout=subprocess.DEVNULL)


CASES = (
    Case(
        "nanoGPT",
        "python",
        "nanoGPT",
        (
            *("python", "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False"),
            *("--eval_iters=1", "--eval_interval=1000", "--log_interval=1", "--block_size=64", "--batch_size=8"),
            *("--n_layer=2", "--n_head=2", "--n_embd=64", "--max_iters=60", "--dropout=0.0"),
        ),
        r"iter \d+: loss ([\d.]+)",
        r"iter \d+: loss [\d.]+, time ([\d.]+)ms",
        prepare=prepare_shakespeare,
    ),
    Case(
        "minGPT",
        "python",
        "minGPT",
        (
            *("python", "projects/adder/adder.py", "--trainer.max_iters=101", "--model.model_type=gpt-nano"),
            "--trainer.num_workers=0",
        ),
        r"train loss ([\d.]+)",
        r"iter_dt ([\d.]+)ms",
        10,
    ),
    Case(
        "PyTorch TP",
        "torchrun",
        "examples/distributed/tensor_parallelism",
        (*TORCHRUN, "tensor_parallel_example.py"),
        "",
        fakes_accelerator=True,
    ),
    Case(
        "PyTorch TP with SP",
        "torchrun",
        "examples/distributed/tensor_parallelism",
        (*TORCHRUN, "sequence_parallel_example.py"),
        "",
        fakes_accelerator=True,
    ),
    Case(
        "accelerate test_sync",
        "accelerate",
        ".",
        (
            *(
                "accelerate",
                "launch",
                "--multi_gpu",
                "--num_processes",
                "2",
                "--num_machines",
                "1",
                "--mixed_precision",
            ),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m"),
            "accelerate.test_utils.scripts.test_sync",
        ),
        r"\*\*(.*)\*\*",
    ),
)


def main() -> int:
    folder = Path(os.environ.get("SCRIPTS", "")).absolute()
    names = set(sys.argv[1:])
    columns = "script, launcher, ranks, results, steps, own clock (ms), page (ms), difference, CPU, bytes, groups"
    print(f"| {columns.replace(', ', ' | ')} |\n{'|---' * 11}|")
    for case in CASES:
        if names and case.name not in names:
            continue
        if not (folder / case.folder).is_dir():
            print(f"| {case.name} | {case.launcher} | not in {folder} |")
            continue
        case.prepare(folder)
        plain, metered = run(case, folder, metered=False), run(case, folder, metered=True)
        print(format_row(case, plain, metered), flush=True)
    return 0


def get_python() -> str:
    return os.environ.get("SCRIPTS_PYTHON") or sys.executable


def run(case: Case, folder: Path, *, metered: bool) -> Result:
    """Run a script, and read its output."""
    with tempfile.TemporaryDirectory() as name:
        own = Path(name) / "own"
        own.mkdir()
        if case.fakes_accelerator:
            (own / "sitecustomize.py").write_text(CPU_ACCELERATOR)
        paths = [str(own), str(folder / case.folder)]
        items, server = listen(Path(name) / "socket")
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(get_python()).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        if metered:
            environment |= build_hook_variables(Path(name) / "socket", paths)
        before = get_cpu_s()
        done = subprocess.run(
            case.command,
            cwd=folder / case.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        cpu_s = get_cpu_s() - before
        server.close()
        if done.returncode:
            raise SystemExit(f"{case.name} ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    losses = re.findall(case.loss, done.stdout) if case.loss else []
    clock = [float(text) for text in re.findall(case.step_ms, done.stdout)] if case.step_ms else []
    return Result(losses, clock, cpu_s, items)


def get_cpu_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def listen(path: Path) -> tuple[dict[int, list[Any]], socket.socket]:
    """Receive the items of all ranks."""
    items: dict[int, list[Any]] = defaultdict(list)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def receive(connection: socket.socket) -> None:
        while size := connection.recv(4, socket.MSG_WAITALL):
            frame = decode_frame(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
            items[frame["rank"]] += frame["items"]

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=receive, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return items, server


def format_row(case: Case, plain: Result, metered: Result) -> str:
    time.sleep(0.2)  # the last frames are read
    items = metered.items.get(0, [])
    steps = [item for item in items if item["kind"] == "step"]
    page = [1000 * seconds for item in steps for seconds in list_step_times(item)]
    cells = {}
    for item in items:
        if item["kind"] == "traffic":
            cells |= {(cell["phase"], cell["op"], cell["axis"]): cell for cell in item["cells"]}
    equal = f"{len(plain.losses)} equal" if plain.losses == metered.losses else "DIFFERENT"
    equal = equal if case.loss else "prints no loss"
    # The first step has no time on the page, because its start is unknown.
    compared = list(zip(metered.step_ms[1:], page[case.printed_every - 1 :: case.printed_every], strict=False))
    own_ms = median(own for own, _ in compared) if compared else None
    page_ms = median(shown for _, shown in compared) if compared else median(page) if page else None
    difference = f"{100 * (page_ms / own_ms - 1):+.1f}%" if own_ms and page_ms else "none"
    row = (
        *(case.name, case.launcher, len(metered.items), equal, steps[-1]["step"] if steps else 0),
        *(f"{own_ms:.1f}" if own_ms else "none", f"{page_ms:.1f}" if page_ms else "none", difference),
        f"{100 * (metered.cpu_s / plain.cpu_s - 1):+.1f}%",
        f"{sum(cell['payload_bytes'] for cell in cells.values()):,}",
        ", ".join(sorted({cell["axis"] for cell in cells.values()})) or "none",
    )
    return "| " + " | ".join(map(str, row)) + " |"


if __name__ == "__main__":
    sys.exit(main())
