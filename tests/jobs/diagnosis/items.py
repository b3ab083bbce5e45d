"""Make telemetry items and diagnoses for tests."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from contracts.telemetry.batches import Item
from contracts.telemetry.items import StepBreakdown, StepItem
from jobs.runs.diagnosis import Diagnosis, HostRanks, PlannedRun, VerdictPayload
from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_spec
from planner.hardware.catalog import CLUSTERS, DEFAULT_CLUSTER
from planner.hardware.cluster import Cluster

ITEM: TypeAdapter[Item] = TypeAdapter(Item)
TOLD: TypeAdapter[VerdictPayload] = TypeAdapter(VerdictPayload)
NOW = 1_700_000_000.0
CPU: Cluster = CLUSTERS[DEFAULT_CLUSTER["cpu"]]


def diagnosis(
    layout: dict[str, Any], train: dict[str, Any] | None = None, members: tuple[HostRanks, ...] = (), **how: Any
) -> Diagnosis:
    """Return the diagnosis of a run of gpt-tiny, planned for CPUs."""
    spec = parse_spec({"model": {"preset": "gpt-tiny"}, "layout": layout, "train": train or {}})
    stored = spec.model_dump(mode="json")
    planned = estimate(spec, CPU)
    hardware = CPU.model_dump(mode="json")
    return Diagnosis(
        PlannedRun(stored, dict(planned), spec.layout.world_size, hardware=hardware, members=members, **how)
    )


def look(diagnosed: Diagnosis, now: float = NOW) -> VerdictPayload:
    """Return the verdict, validated against its schema."""
    return TOLD.validate_python(diagnosed.make_verdict(now), strict=True)


def step(rank: int, number: int, step_s: float = 0.1, parts: StepBreakdown | None = None, **more: Any) -> StepItem:
    item: dict[str, Any] = {
        "kind": "step",
        "rank": rank,
        "time": NOW + number * step_s,
        "step": number,
        "ran": number,
        "steps": 50,
        "step_s": step_s,
        "tokens": 1024,
        "loss": 5.0 if rank == 0 else None,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "cells": [],
        **more,
    }
    if parts is not None:
        item["parts"] = parts
    checked: Any = ITEM.validate_python(item)
    return checked  # type: ignore[no-any-return]
