"""A model, a layout and a cluster that stacks are compared on."""

from __future__ import annotations

from planner.facts.models.presets import PRESETS
from planner.facts.spec import JobSpec, Layout, Resources, StackName, TrainSpec
from planner.hardware.clusters import CLUSTERS

H100 = CLUSTERS["h100"]
TRAIN = TrainSpec(global_batch=256, micro_batches=4, seq_len=4096, precision="bf16")
SPEC = JobSpec(
    model=PRESETS["llama3-8b"].model,
    layout=Layout(dp=32, tp=2, zero=1, sequence_parallel=True),
    train=TRAIN,
    resources=Resources(device="cuda"),
)


def on(stack: StackName, spec: JobSpec = SPEC) -> JobSpec:
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"stack": stack})})
