"""Record when each step of a process ends, with and without the meter. It is the `sitecustomize` of the scripts.

The file STEP_CLOCK.PID gets a line per optimizer step with wall time and CPU time. With FAKE_ACCELERATOR, examples that
expect GPUs find a CPU instead.
"""

import atexit
import os
import sys
import time
from importlib.abc import MetaPathFinder


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

    def record(stepped, *_args) -> None:
        nonlocal leader
        leader = leader or id(stepped)
        if id(stepped) == leader:
            times.append((time.perf_counter(), time.process_time()))

    def write() -> None:
        if times:
            with open(f"{os.environ['STEP_CLOCK']}.{os.getpid()}", "w") as file:
                file.writelines(f"{wall_s} {cpu_s}\n" for wall_s, cpu_s in times)

    optimizer.register_optimizer_step_post_hook(record)
    atexit.register(write)


def replace_accelerator() -> None:
    """Let a script find devices, and run it on the CPU."""
    import torch

    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 8
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")


def move_tensors_to_cpu() -> None:
    """Create the tensors on the CPU that picotron creates on a GPU even if it trains on the CPU."""
    import torch

    original = torch.tensor

    def tensor(*args, device=None, **kwargs):
        return original(*args, device=None if device == "cuda" else device, **kwargs)

    torch.tensor = tensor


# Modules of scripts, which are imported after torch.
REPLACEMENTS = {"log_utils": replace_accelerator, "picotron": move_tensors_to_cpu}
if os.environ.get("STEP_CLOCK"):
    sys.meta_path.insert(0, AfterTorch())
