"""Run the trainer on one rank: `python -m workers.trainer`, started by torchrun."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from contracts.names import SAVE_FILE
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.validation import SpecError
from workers import rank_environment
from workers.checkpoint.folder import CheckpointLocation, get_checkpoint_location
from workers.device import get_device_name, get_local_device
from workers.meter import Exporter, Recorder, register_metered_backend
from workers.meter.exporter import StartReporter, add_telemetry_options
from workers.meter.rank_exit import fail, print_line, run_and_exit
from workers.rank_environment import get_group_timeout
from workers.trainer.dataset import load_job_dataset
from workers.trainer.errors import DivergedError, UserError, VerificationError
from workers.trainer.memory import (
    PeakMemory,
    configure_large_allocations,
    limit_primitive_cache,
    preload_lazy_imports,
    release_free_memory,
    use_single_heap,
)
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.spec_file import load_spec
from workers.trainer.trainer import RunHooks, Send, ShouldStop, Trainer
from workers.trainer.verification import RunVerifier

FP8_CAPABILITY = (8, 9)  # Ada, Hopper and later
POLL_INTERVAL_S = 1.0
MAX_STEPS_BETWEEN_POLLS = 100_000  # between two polls
LAST = "last"


def main() -> int:
    """Parse the options, train, and return the exit code."""
    rank_environment.accept_sigterm_from_parent()
    parser = argparse.ArgumentParser(prog="python -m workers.trainer", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file with the job spec")
    parser.add_argument("--data-root", type=Path, required=True, help="directory of training data")
    parser.add_argument("--checkpoint-root", type=Path, help="directory of checkpoints")
    parser.add_argument(
        "--expect-checkpoint",
        default="",
        help="required checkpoint (job/attempt/step-n); a later checkpoint is also accepted",
    )
    parser.add_argument("--checkpoint-host", default="", help="host that wrote the expected checkpoint")
    parser.add_argument(
        "--loan", type=Path, help="file into which the supervisor of rank 0 writes the host that sends the checkpoint"
    )
    parser.add_argument("--host", default="", help="name of this host (default: the machine name)")
    add_telemetry_options(parser)
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        spec = load_spec(options.spec, world)
        recorder = Recorder(rank)
        exporter = Exporter(recorder, options.telemetry, options.job, options.attempt) if options.telemetry else None
        try:
            expected = (options.expect_checkpoint, options.checkpoint_host, options.loan, options.host)
            location = get_checkpoint_location(spec, options.checkpoint_root, options.job, options.attempt, *expected)
            should_stop = None
            if options.telemetry is not None:  # the supervisor writes the file next to its socket
                should_stop = StopRequest(Path(options.telemetry).with_name(SAVE_FILE), rank, world)
            run(spec, rank, options.data_root, recorder, exporter, location, should_stop)
        finally:
            if exporter is not None:
                exporter.close()
    except (UserError, SpecError) as error:
        return fail(str(error), 2)
    except (DivergedError, VerificationError) as error:
        return fail(str(error), 1)
    return 0


def run(
    spec: JobSpec,
    rank: int,
    data_root: Path,
    recorder: Recorder,
    exporter: Exporter | None,
    location: CheckpointLocation | None,
    should_stop: ShouldStop | None = None,
) -> None:
    """Set up this rank, train, and destroy the process group."""
    send: Send = exporter.send if exporter else lambda _item: None
    startup = StartReporter(rank, send)
    startup.report("imported")
    configure_large_allocations()  # before the first tensor
    if spec.resources.device == "cpu":
        use_single_heap()
        limit_primitive_cache()
    device = select_device(spec)
    dataset = load_job_dataset(spec, data_root)
    dist.init_process_group(register_metered_backend(recorder, spec.resources.device), timeout=get_group_timeout())
    startup.report("met")
    try:
        mesh = build_mesh(spec, rank, recorder.label_group)
        preload_lazy_imports(spec)
        # Memory that imports left free would hide the same amount of training memory.
        release_free_memory()
        peak = PeakMemory(device)
        trainer = Trainer.build(spec, mesh, dataset, recorder, device)
        startup.report("built")
        hooks = RunHooks(send, print_line, peak=peak, startup=startup, should_stop=should_stop)
        if location is None:
            hooks.verifier = RunVerifier(trainer, send, print_line)
            trainer.train(hooks)
        else:
            train_with_checkpoints(trainer, location, hooks)
    finally:
        dist.destroy_process_group()


def train_with_checkpoints(trainer: Trainer, location: CheckpointLocation, hooks: RunHooks) -> None:
    """Load the newest checkpoint, train, and wait for the last save."""
    # This import takes almost a second, so only runs with checkpoints pay for it.
    from workers.checkpoint.manager import CheckpointManager

    group = checkpoint_group(trainer.recorder)
    checkpoints = CheckpointManager(trainer, location, group, hooks.send, hooks.log)
    try:
        hooks.steps_done = checkpoints.load()
        hooks.save = checkpoints.save if trainer.spec.train.checkpoint_every else None
        load_reference = checkpoints.load_into if hooks.steps_done else None
        hooks.verifier = RunVerifier(trainer, hooks.send, hooks.log, hooks.steps_done, load_reference)
        trainer.train(hooks)
    finally:
        checkpoints.close()


def checkpoint_group(recorder: Recorder) -> dist.ProcessGroup | None:
    """Create a CPU group of all ranks for checkpoints. Return None for one rank."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend=register_metered_backend(recorder, "cpu"), timeout=get_group_timeout())
    assert isinstance(group, dist.ProcessGroup)
    recorder.label_group(group.group_name, "world", "checkpoint")
    return group


def select_device(spec: JobSpec) -> torch.device:
    """Return the device of this rank, and raise a `UserError` if it cannot run the spec."""
    if spec.resources.device == "cuda" and not torch.cuda.is_available():
        raise UserError("`resources.device` is cuda, but this host has no usable GPU.")
    device = get_local_device(spec.resources.device)
    if device.type == "cuda" and get_mixed_precision(spec.train.precision).gemm == "fp8":
        found = torch.cuda.get_device_capability(device)
        if found < FP8_CAPABILITY:
            needed, own = (".".join(map(str, capability)) for capability in (FP8_CAPABILITY, found))
            here = f"{get_device_name(device)} has {own}"
            raise UserError(
                f"`train.precision` is {spec.train.precision}, but fp8 matmuls need compute capability {needed} or "
                f"more, and {here}."
            )
    return device


class StopRequest:
    """Return whether a step is the last, because the supervisor requested a save. Each rank calls it after every step.

    Rank 0 looks for a file from its supervisor about once per second. It publishes in the rendezvous store whether this
    step is the last, or the next step at which ranks ask again. Ranks exchange no messages, and wait only for rank 0,
    which has finished the same step.
    """

    def __init__(self, file: Path, rank: int, world: int) -> None:
        self._file, self._rank, self._world = file, rank, world
        self._store: Store | None = None
        self._next, self._polled_at_s = 0, time.monotonic()
        self._done = 0  # steps at the last poll

    def __call__(self, step: int) -> bool:
        if step < self._next:
            return False
        answer = self._poll_file(step) if self._rank == 0 else self._get_store().get(str(step)).decode()
        if answer == LAST:
            return True
        self._next = int(answer)
        return False

    def _poll_file(self, step: int) -> str:
        now = time.monotonic()
        step_s = (now - self._polled_at_s) / (step - self._done) if self._done else POLL_INTERVAL_S
        before, self._polled_at_s, self._done = self._done, now, step
        ahead = min(MAX_STEPS_BETWEEN_POLLS, max(1, round(POLL_INTERVAL_S / max(step_s, 1e-6))))
        answer = LAST if self._file.exists() else str(step + ahead)
        if self._world > 1:
            self._get_store().set(str(step), answer)
            self._get_store().delete_key(str(before))  # All ranks have finished a later step, so all have read the key.
        return answer

    def _get_store(self) -> Store:
        """Connect to the store with a separate client, because other threads may block on theirs."""
        if self._store is None:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            plain = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=get_group_timeout())
            self._store = PrefixStore("asked", plain)
        return self._store


if __name__ == "__main__":
    run_and_exit(main)
