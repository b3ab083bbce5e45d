"""What can be planned but not run yet: the trainer's own limits, told before anything is launched."""

from __future__ import annotations

from planner.layout import SCHEDULE_NAMES
from planner.spec import JobSpec, Problem

RUN_SCHEDULES = ("gpipe", "1f1b")
RUN_PRECISIONS = ("fp32", "bf16")


def not_runnable(spec: JobSpec) -> list[Problem]:
    """Every field whose value the trainer does not implement. Empty means that a valid spec can be submitted."""
    model, layout, train = spec.model, spec.layout, spec.train
    found = []

    def refuse(field: str, what: str) -> None:
        found.append(Problem(field, f"{what} can be planned, but not run yet"))

    if model.moe:
        refuse("model.moe", "a mixture of experts")
    if model.mla:
        refuse("model.mla", "latent attention")
    if layout.cp > 1:
        refuse("layout.cp", f"context parallelism (cp {layout.cp})")
    if layout.ep > 1:
        refuse("layout.ep", f"expert parallelism (ep {layout.ep})")
    if layout.dp_replicas > 1:
        refuse("layout.dp_replicas", f"HSDP ({layout.dp_replicas} replicas)")
    if layout.tp > model.num_kv_heads:
        refuse("layout.tp", f"tp {layout.tp} beyond the {model.num_kv_heads} key/value heads")
    if layout.regather:
        refuse("layout.regather", "gathering inputs again")
    if layout.scatter_gather:
        refuse("layout.scatter_gather", "sending parts over a stage boundary")
    if layout.pp > 1 and layout.schedule not in RUN_SCHEDULES:
        refuse("layout.schedule", f"the {SCHEDULE_NAMES[layout.schedule]} schedule")
    elif layout.virtual_stages > 1:
        refuse("layout.virtual_stages", f"{layout.virtual_stages} chunks a stage")
    if layout.recompute != "none":
        refuse("layout.recompute", f"{layout.recompute} recompute")
    if train.precision not in RUN_PRECISIONS:
        refuse("train.precision", f"precision {train.precision}")
    if train.attention != "fused":
        refuse("train.attention", "attention that keeps every score")
    if not train.overlap:
        refuse("train.overlap", "reducing gradients only after backward")
    if train.dropout:
        refuse("train.dropout", "dropout")
    return found
