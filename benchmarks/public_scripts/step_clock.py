"""Record when each step of a process ends, with and without the meter. It is the `sitecustomize` of the scripts.

The file STEP_CLOCK.PID gets the time of each optimizer step. With PROFILER, py-spy writes the stacks of the process
after the first steps to STEP_CLOCK.PID.stacks. With FAKE_ACCELERATOR, examples that expect GPUs find a CPU instead.
"""

import atexit
import os
import subprocess
import sys
import time
from importlib.abc import MetaPathFinder

WARMUP_STEPS = 3
SAMPLES_PER_S = 200


class AfterTorch(MetaPathFinder):
    """Install the clock when a module is imported after torch."""

    def __init__(self) -> None:
        self.has_clock = False

    def find_spec(self, name, path=None, target=None):
        optimizer = sys.modules.get("torch.optim.optimizer")
        if not self.has_clock and hasattr(optimizer, "register_optimizer_step_post_hook"):
            self.has_clock = True
            install_clock(optimizer)
        if name in REPLACEMENTS and os.environ.get("FAKE_ACCELERATOR"):
            REPLACEMENTS[name]()


def install_clock(optimizer) -> None:
    times = []
    leader = None
    file_name = f"{os.environ['STEP_CLOCK']}.{os.getpid()}"

    def record(stepped, *_args) -> None:
        nonlocal leader
        leader = leader or id(stepped)
        if id(stepped) != leader:
            return
        times.append(time.perf_counter())
        if len(times) == WARMUP_STEPS and os.environ.get("PROFILER"):
            options = ("--format", "raw", "--rate", str(SAMPLES_PER_S), "--nonblocking", "--duration", "3600")
            profiler = (os.environ["PROFILER"], "record", *options, "--pid", str(os.getpid()))
            output = subprocess.DEVNULL
            subprocess.Popen([*profiler, "--output", f"{file_name}.stacks"], stdout=output, stderr=output)

    def write() -> None:
        if times:
            with open(file_name, "w") as file:
                file.writelines(f"{wall_s}\n" for wall_s in times)

    optimizer.register_optimizer_step_post_hook(record)
    atexit.register(write)


def replace_accelerator() -> None:
    """Let a script find devices, and run it on the CPU."""
    import torch

    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 8
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")


def move_picotron_to_cpu() -> None:
    """Create the tensors on the CPU that picotron creates on a GPU even if it trains on the CPU, and ignore waits."""
    import torch

    original = torch.tensor

    def tensor(*args, device=None, **kwargs):
        return original(*args, device=None if device == "cuda" else device, **kwargs)

    torch.tensor = tensor
    torch.cuda.synchronize = lambda *_: None


# Modules of scripts, which are imported after torch.
REPLACEMENTS = {"log_utils": replace_accelerator, "picotron": move_picotron_to_cpu}
if os.environ.get("STEP_CLOCK"):
    sys.meta_path.insert(0, AfterTorch())
