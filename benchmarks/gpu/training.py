"""A run of the trainer, as a job's is, and what is measured of it.

`--purpose` says which: parity (the run's own proof, and its losses beside one process on the CPU), memory, or speed
(and where the time of one step more goes on the device).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gpu.kernels import shares
from benchmarks.gpu.metering import profiled
from benchmarks.gpu.rank import arguments, begin, meet, nothing_found, tell
from benchmarks.gpu.results import Found
from contracts.telemetry.batches import Item
from contracts.telemetry.items import WARMUP_STEPS, StepItem
from contracts.telemetry.results import ProofItem, VerdictItem
from planner.facts.model_shapes import compute_model_flops
from planner.facts.parse_spec import parse_spec
from planner.facts.single_process_reference import COMPARED_STEPS, get_tolerances
from planner.facts.spec import JobSpec
from workers.meter import Recorder
from workers.meter.rank_exit import run_and_exit
from workers.trainer.dataset import load_job_dataset
from workers.trainer.memory import PeakMemory, configure_large_allocations
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.trainer import RunHooks, Trainer
from workers.trainer.verification import RunVerifier
from workers.trainer.verification.reference import compute_reference


class Ran(NamedTuple):
    """Of one rank: what made it, which can go on, and what it sent."""

    trainer: Trainer
    steps: list[StepItem]
    verdict: VerdictItem
    proof: ProofItem | None

    @property
    def wrong_bytes(self) -> int:
        return sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in self.verdict["rows"])

    @property
    def wrong_calls(self) -> int:
        return sum(abs(row["measured_count"] - row["predicted_count"]) for row in self.verdict["rows"])


def run(spec: JobSpec, recorder: Recorder, device: torch.device, data: Path, *, proves: bool) -> Ran:
    """The whole job on this rank."""
    configure_large_allocations()
    corpus = load_job_dataset(spec, data)
    mesh, peak = build_mesh(spec, recorder.rank, recorder.label_group), PeakMemory(device)
    trainer = Trainer.build(spec, mesh, corpus, recorder, device)
    items: list[Item] = []
    watch = RunVerifier(trainer, items.append, print) if proves else None
    trainer.train(RunHooks(items.append, print, verifier=watch, peak=peak))
    steps = [item for item in items if item["kind"] == "step"]
    proofs = [item for item in items if item["kind"] == "proof"]
    verdict = next(item for item in items if item["kind"] == "verdict")
    return Ran(trainer, steps, verdict, proofs[-1] if proofs else None)


def everyone_off(ran: Ran) -> tuple[int, int]:
    """Bytes and calls by which all ranks' measurements are off the prediction; they call this together."""
    everyone: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (ran.wrong_bytes, ran.wrong_calls))
    wrong_bytes, wrong_calls = (sum(column) for column in zip(*everyone, strict=True))
    return wrong_bytes, wrong_calls


def bytes_as_planned(ran: Ran, found: Found) -> None:
    """Of all ranks together; they call this together."""
    wrong_bytes, wrong_calls = everyone_off(ran)
    if wrong_bytes or wrong_calls:
        found["wrong"].append(f"absolute difference {wrong_bytes:,} B, {wrong_calls} calls")


def parity(spec: JobSpec, ran: Ran, data: Path) -> Found:
    """Return the verification of rank 0, and its losses compared with a CPU reference in fp32."""
    found = nothing_found()
    assert ran.proof is not None
    one, copies = ran.proof["one_process"], ran.proof["replicas"]
    if one["state"] != "equal":
        found["wrong"].append(f"reference: {one['state']} {one['why']}".rstrip())
    found["wrong"] += [f"{apart['what']} of {apart['name']} differs" for apart in ran.proof["wrong"]]
    found["measured"] = {
        "gradients, difference from reference": one["gradient"],
        "losses, difference from reference": one["loss"],
        "norms, difference from reference": one["norm"],
        "replicas, difference": copies["apart"],
    }
    most = get_tolerances(spec)
    found["beside"] = dict(zip(found["measured"], (most.gradient, most.loss, most.norm, most.replicas), strict=True))
    if spec.resources.device == "cuda":
        expected = compute_reference(spec, load_job_dataset(spec, data), torch.device("cpu"), COMPARED_STEPS).results
        pairs = zip(ran.steps, expected, strict=False)
        apart = max(abs((step["loss"] or 0.0) / other.loss - 1) for step, other in pairs)
        name = "losses, difference from CPU reference"
        found["measured"][name], found["beside"][name] = apart, most.loss
        if apart > most.loss:
            found["wrong"].append(f"losses differ from the CPU's by {apart:.1e} (limit {most.loss:.0e})")
    found["notes"].append("Expected values are limits for rounding")
    return found


def memory(ran: Ran, device: torch.device) -> Found:
    """The most that any rank held at once. All ranks call this together."""
    own = torch.tensor([ran.verdict.get("peak_bytes", 0), torch.cuda.max_memory_reserved(device)], device=device)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    allocated, reserved = own.tolist()
    found = nothing_found()
    found["measured"] = {"allocated, GiB": allocated / 2**30, "reserved, GiB": reserved / 2**30}
    return found


def speed(spec: JobSpec, ran: Ran, peak_flops: float | None) -> Found:
    """Rank 0's: of the steps after the first few, which compile and fill caches."""
    found = nothing_found()
    seconds = statistics.median(step["step_s"] for step in ran.steps[WARMUP_STEPS:])
    each = compute_model_flops(spec) / seconds / spec.layout.world_size
    tokens = spec.train.global_batch * spec.train.seq_len
    found["measured"] = {
        "step, ms": seconds * 1e3,
        "tokens/s": tokens / seconds,
        "TFLOP/s a rank": each / 1e12,
        "most allocated, GiB": ran.verdict.get("peak_bytes", 0) / 2**30,
    }
    if peak_flops:
        found["measured"]["MFU, %"] = each / peak_flops * 100
    return found


def kernels(trainer: Trainer, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Of one step after the last. All ranks call this together."""
    return shares(profiled(lambda: trainer.train_step(trainer.spec.train.steps), device))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--purpose", choices=("parity", "memory", "speed"), required=True)
    parser.add_argument("--spec", required=True, help="JSON")
    parser.add_argument("--peak-flops", type=float, help="dense peak of a device")
    options = parser.parse_args()
    device = begin(options)
    spec = parse_spec(json.loads(options.spec))
    recorder = meet(device)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        ran = run(spec, recorder, device, data, proves=options.purpose == "parity")
        found = nothing_found()
        if options.purpose == "memory":
            found = memory(ran, device)
        elif options.purpose == "speed":
            found = speed(spec, ran, options.peak_flops)
            by_kind, longest = kernels(ran.trainer, device)
            found["measured"] |= by_kind
            found["notes"] += longest
        elif recorder.rank == 0:
            found = parity(spec, ran, data)
    bytes_as_planned(ran, found)
    if recorder.rank == 0:
        tell(options.out, found)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
