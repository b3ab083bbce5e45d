"""Run the trainer as a job does, and check or measure the run.

`--purpose` selects parity (the verification of the run, and losses compared with a CPU reference), memory, or speed
(with a profile of one more step).
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gpu.metering import profile_call
from benchmarks.gpu.rank import build_empty_result, build_parser, init_metered_group, set_up_device, write_result
from benchmarks.gpu.results import PartOutput
from contracts.telemetry.batches import Item
from contracts.telemetry.items import WARMUP_STEPS, StepItem
from contracts.telemetry.results import ProofItem, VerdictItem
from planner.facts.model_shapes import compute_model_flops
from planner.facts.parse_spec import parse_spec
from planner.facts.single_process_reference import (
    BF16_TOLERANCES,
    COMPARED_STEPS,
    get_tolerances,
    needs_fp32_reference,
)
from planner.facts.spec import JobSpec, Precision
from workers.meter import Recorder
from workers.meter.rank_exit import run_and_exit
from workers.trainer.dataset import load_job_dataset
from workers.trainer.memory import PeakMemory, configure_large_allocations
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.trainer import RunHooks, Trainer
from workers.trainer.verification import RunVerifier
from workers.trainer.verification.reference import compute_reference


class TrainingRun(NamedTuple):
    """Trainer and telemetry of one rank after a run."""

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


def run_training(spec: JobSpec, recorder: Recorder, device: torch.device, data: Path, *, proves: bool) -> TrainingRun:
    """Run the whole job on this rank."""
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
    return TrainingRun(trainer, steps, verdict, proofs[-1] if proofs else None)


def sum_differences(ran: TrainingRun) -> tuple[int, int]:
    """Return the bytes and calls of all ranks that differ from the prediction. All ranks call this function."""
    everyone: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (ran.wrong_bytes, ran.wrong_calls))
    wrong_bytes, wrong_calls = (sum(column) for column in zip(*everyone, strict=True))
    return wrong_bytes, wrong_calls


def check_traffic(ran: TrainingRun, found: PartOutput) -> None:
    """Add a problem if bytes or calls of all ranks differ from the prediction. All ranks call this function."""
    wrong_bytes, wrong_calls = sum_differences(ran)
    if wrong_bytes or wrong_calls:
        found["wrong"].append(f"absolute difference {wrong_bytes:,} B, {wrong_calls} calls")


def check_parity(spec: JobSpec, ran: TrainingRun, data: Path) -> PartOutput:
    """Return the verification of rank 0, and its losses compared with a CPU reference in fp32."""
    found = build_empty_result()
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
        precision: Precision | None = "fp32" if needs_fp32_reference(spec) else None
        limit = BF16_TOLERANCES.loss if precision else most.loss
        dataset, cpu = load_job_dataset(spec, data), torch.device("cpu")
        expected = compute_reference(spec, dataset, cpu, COMPARED_STEPS, precision=precision).results
        pairs = zip(ran.steps, expected, strict=False)
        apart = max(abs((step["loss"] or 0.0) / other.loss - 1) for step, other in pairs)
        name = "losses, difference from CPU reference"
        found["measured"][name], found["beside"][name] = apart, limit
        if apart > limit:
            found["wrong"].append(f"losses differ from the CPU's by {apart:.1e} (limit {limit:.0e})")
    found["notes"].append("Expected values are limits for rounding")
    return found


def measure_memory(ran: TrainingRun, device: torch.device) -> PartOutput:
    """Return the largest peak memory of all ranks. All ranks call this function."""
    own = torch.tensor([ran.verdict.get("peak_bytes", 0), torch.cuda.max_memory_reserved(device)], device=device)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    allocated, reserved = own.tolist()
    found = build_empty_result()
    found["measured"] = {"allocated, GiB": allocated / 2**30, "reserved, GiB": reserved / 2**30}
    return found


def measure_speed(spec: JobSpec, ran: TrainingRun, peak_flops: float | None) -> PartOutput:
    """Return the speed of rank 0 without the first steps, which compile and fill caches."""
    found = build_empty_result()
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


def profile_kernels(trainer: Trainer, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Profile one step after the last. All ranks call this function."""
    return sum_kernel_times(profile_call(lambda: trainer.train_step(trainer.spec.train.steps), device))


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--purpose", choices=("parity", "memory", "speed"), required=True)
    parser.add_argument("--spec", required=True, help="JSON")
    parser.add_argument("--peak-flops", type=float, help="dense peak of a device")
    options = parser.parse_args()
    device = set_up_device(options)
    spec = parse_spec(json.loads(options.spec))
    recorder = init_metered_group(device)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        ran = run_training(spec, recorder, device, data, proves=options.purpose == "parity")
        found = build_empty_result()
        if options.purpose == "memory":
            found = measure_memory(ran, device)
        elif options.purpose == "speed":
            found = measure_speed(spec, ran, options.peak_flops)
            by_kind, longest = profile_kernels(ran.trainer, device)
            found["measured"] |= by_kind
            found["notes"] += longest
        elif recorder.rank == 0:
            found = check_parity(spec, ran, data)
    check_traffic(ran, found)
    if recorder.rank == 0:
        write_result(options.out, found)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_and_exit(main)

# The first that matches a kernel's name. Inductor's kernels are fused from passes over memory.
KINDS = (
    ("sends", r"nccl"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas"),
    ("optimizer", r"multi_tensor|adam"),
    ("passes, compiled", r"triton"),
)
COPIES, OTHERS, ANY = "copies", "passes", "any"
MAX_LISTED_KERNELS = 8


def classify_kernel(event: Mapping[str, Any]) -> str:
    if str(event.get("cat", "")).startswith("gpu_mem"):
        return COPIES
    return next((kind for kind, words in KINDS if re.search(words, event["name"], re.IGNORECASE)), OTHERS)


def _format_figure(kind: str) -> str:
    return f"kernels of one more step, {kind}, ms"


def sum_kernel_times(events: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """Return milliseconds by kind, with the time in which any kernel ran, and the longest kernels.

    The result is empty for a trace of a CPU.
    """
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    spans = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        by_kind[_format_figure(classify_kernel(event))] += event["dur"] / 1e3
        by_name[event["name"]] += event["dur"] / 1e3
        spans.append((event["ts"], event["ts"] + event["dur"]))
    if spans:
        by_kind[_format_figure(ANY)] = _compute_covered_us(spans) / 1e3
    longest = sorted(by_name, key=by_name.__getitem__, reverse=True)[:MAX_LISTED_KERNELS]
    return dict(by_kind), [f"{by_name[name]:.1f} ms {name[:90]}" for name in longest]


def _compute_covered_us(spans: Iterable[tuple[float, float]]) -> float:
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
