"""Model, layout and cluster with_stack which tests compare training stacks."""

from __future__ import annotations

from planner.facts.presets import PRESETS
from planner.facts.resources import Resources, StackName
from planner.facts.spec import JobSpec, Layout, TrainSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.profile import CollectivePoint, GemmPoint, HostProfile, StreamPoint

H100 = CLUSTERS["h100"]
TRAIN = TrainSpec(global_batch=256, micro_batches=4, seq_len=4096, precision="bf16")
SPEC = JobSpec(
    model=PRESETS["llama3-8b"].model,
    layout=Layout(dp=32, tp=2, zero=1, sequence_parallel=True),
    train=TRAIN,
    resources=Resources(device="cuda"),
)


def with_stack(stack: StackName, spec: JobSpec = SPEC) -> JobSpec:
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"stack": stack})})


def build_calibration(*collectives: CollectivePoint) -> HostProfile:
    """Return a host calibration with one point of each kind and the given collectives."""
    return HostProfile(
        device="cpu",
        device_name="a host",
        torch_version="2.13",
        cores=2,
        slots=8,
        memory_bytes=2**34,
        measured_at="2026-11-22T07:00:00+00:00",
        gemm=(GemmPoint(ranks=1, precision="fp32", m=512, n=512, k=512, seconds=1e-3),),
        stream=(StreamPoint(ranks=1, num_bytes=2**20, seconds=1e-4),),
        collectives=collectives,
    )
