"""`python -m workers.trainer`, one process a rank, started by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from contracts.names import SAVE_FILE
from planner.facts.parse_spec import parse_spec
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError
from workers import rank_environment
from workers.checkpoint.folder import Place, place_of
from workers.device import get_device_name, get_local_device
from workers.meter import Exporter, Recorder, register_metered_backend
from workers.meter.exporter import StartReporter
from workers.meter.rank_exit import fail, run_and_exit
from workers.rank_environment import get_group_timeout
from workers.trainer.allocator import forget_shapes, give_back, return_large_tensors, reuse_what_is_freed
from workers.trainer.dataset import corpus_of
from workers.trainer.errors import DivergedError, ProofError, UserError
from workers.trainer.memory import Peak, load_libraries
from workers.trainer.parallel.mesh import make_mesh
from workers.trainer.parallel.parallelize import parallelize
from workers.trainer.stop_request import Asked
from workers.trainer.trainer import Send, Stop, Trainer, train
from workers.trainer.verification import Proof

FP8_CAPABILITY = (8, 9)  # Ada, Hopper and later


def main() -> int:
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
    parser.add_argument("--job", default="local")
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--telemetry", help="Unix socket of the supervisor")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        spec = spec_of(options.spec, world)
        recorder = Recorder(rank)
        exporter = Exporter(recorder, options.telemetry, options.job, options.attempt) if options.telemetry else None
        try:
            expected = (options.expect_checkpoint, options.checkpoint_host, options.loan, options.host)
            place = place_of(spec, options.checkpoint_root, options.job, options.attempt, *expected)
            run(spec, rank, options.data_root, recorder, exporter, place, _stop(options.telemetry, rank, world))
        finally:
            if exporter is not None:
                exporter.close()
    except (UserError, SpecError) as error:
        return fail(str(error), 2)
    except (DivergedError, ProofError) as error:
        return fail(str(error), 1)
    return 0


def run(
    spec: JobSpec,
    rank: int,
    data_root: Path,
    recorder: Recorder,
    exporter: Exporter | None,
    place: Place | None,
    stop: Stop | None = None,
) -> None:
    """Set up this rank, train, and take the process group down."""
    send: Send = exporter.send if exporter else lambda _item: None
    start = StartReporter(rank, send)
    start.report("imported")
    return_large_tensors()
    if spec.resources.device == "cpu":
        reuse_what_is_freed()
        forget_shapes()
    device = _device(spec)
    corpus = corpus_of(spec, data_root)
    dist.init_process_group(register_metered_backend(recorder, spec.resources.device), timeout=get_group_timeout())
    start.report("met")
    try:
        mesh = make_mesh(spec, rank, recorder.label_group)
        load_libraries(spec)
        give_back()  # what imports left would hide as much of what is built
        peak = Peak(device)
        part = parallelize(spec, mesh, device)
        trainer = Trainer(spec, mesh, part, corpus, recorder, device)
        start.report("built")
        if place is None:
            train(trainer, send, _say, watch=Proof(trainer, send, _say), peak=peak, start=start)
            return
        from workers.checkpoint.manager import JobCheckpoints  # takes most of a second, which other runs need not wait

        checkpoints = JobCheckpoints(spec, trainer, place, checkpoint_group(recorder), send, _say)
        try:
            done = checkpoints.resume()
            save = checkpoints.save if spec.train.checkpoint_every else None
            proof = Proof(trainer, send, _say, done, checkpoints.restored if done else None)
            train(trainer, send, _say, done, save, proof, peak, start, stop)
        finally:
            checkpoints.close()
    finally:
        dist.destroy_process_group()


def checkpoint_group(recorder: Recorder) -> dist.ProcessGroup | None:
    """All ranks, on the CPU, for what is agreed on beside training. None for one rank."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend=register_metered_backend(recorder, "cpu"), timeout=get_group_timeout())
    assert isinstance(group, dist.ProcessGroup)
    recorder.label_group(group.group_name, "world", "checkpoint")
    return group


def _say(line: str) -> None:
    # One write: print would send the newline by itself, and lines of ranks that share a pipe would mix.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _stop(telemetry: str | None, rank: int, world: int) -> Stop | None:
    """Where a supervisor may ask this rank to stop: beside the socket that it listens on."""
    return None if telemetry is None else Asked(Path(telemetry).with_name(SAVE_FILE), rank, world)


def spec_of(path: Path, world: int) -> JobSpec:
    """What a rank of `world` is to train.

    Raises:
        UserError: there is no spec, or it is for another number of ranks.
        SpecError: with every field that is wrong, or that it would train otherwise than it was asked.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"`--spec` is {str(path)!r}, which cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"`--spec` is {str(path)!r}, which is not JSON: {error}.") from None
    spec = parse_spec(content)
    if refused := find_unsupported_fields(spec):
        raise SpecError(refused)
    if spec.layout.world_size != world:
        raise UserError(f"`layout` needs {spec.layout.world_size} ranks, but torchrun started {world}.")
    return spec


def _device(spec: JobSpec) -> torch.device:
    if spec.resources.device == "cuda" and not torch.cuda.is_available():
        raise UserError("`resources.device` is cuda, but this host has no usable GPU.")
    device = get_local_device(spec.resources.device)
    if device.type == "cuda" and get_mixed_precision(spec.train.precision).gemm == "fp8":
        found = torch.cuda.get_device_capability(device)
        if found < FP8_CAPABILITY:
            needed, here = _dotted(FP8_CAPABILITY), f"{get_device_name(device)} has {_dotted(found)}"
            raise UserError(
                f"`train.precision` is {spec.train.precision}, but fp8 matmuls need compute capability {needed} or "
                f"more, and {here}."
            )
    return device


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


if __name__ == "__main__":
    run_and_exit(main)
