"""Build the cluster of an accelerator that a user describes by a few numbers.

Requests name the cluster with a text such as OWN_EXAMPLE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from planner.facts.parse_spec import convert_error
from planner.facts.validation import Problem, SpecError, StrictModel
from planner.hardware.catalog import GB, build_gpu, build_gpu_cluster
from planner.hardware.cluster import Cluster

OWN_PREFIX = "own:"
OWN_EXAMPLE = "`own:memory_gb=80,bf16_tflops=989,memory_gb_s=3350,node_gb_s=450,network_gb_s=50`"
OWN_NAME = "Own accelerator"
# Peak of bf16 over the peak of fp32 with torch's default settings, on an A100 (16) and an H100 (15).
BF16_SPEEDUP = 16
# Streaming multiprocessors of an H100. They set how much of the peak a matmul with few tiles reaches.
DEFAULT_SMS = 132
MAX_TEXT_CHARS = 200

Rate = Annotated[float, Field(gt=0, le=1e6)]


class OwnAccelerator(StrictModel):
    """Figures of a data sheet. Peaks are dense, GB are 10^9 bytes, and links are in one direction."""

    memory_gb: float = Field(gt=2.2, le=1e5, description="memory (GB)")  # The device context takes 2 GiB.
    bf16_tflops: Rate = Field(description="dense peak in bf16 (TFLOP/s)")
    memory_gb_s: Rate = Field(description="memory bandwidth (GB/s)")
    node_gb_s: Rate = Field(description="link inside a node, per GPU and direction (GB/s)")
    network_gb_s: Rate = Field(description="network per GPU and direction (GB/s); 400 Gb/s are 50")
    gpus_per_node: int = Field(default=8, ge=1, le=4096, description="GPUs per node")
    name: str = Field(default=OWN_NAME, min_length=1, max_length=60, pattern=r"^[\w .+()/-]*$")


def parse_own_cluster(text: str) -> Cluster:
    """Return the cluster of a text `own:FIELD=NUMBER,...`.

    Raises:
        SpecError: With every field that is missing, unknown, or invalid.
    """
    if len(text) > MAX_TEXT_CHARS:
        message = f"`cluster` has {len(text)} characters. Use at most {MAX_TEXT_CHARS}."
        raise SpecError([Problem("cluster", message)])
    fields: dict[str, Any] = {}
    for part in text.removeprefix(OWN_PREFIX).split(","):
        name, equals, value = part.strip().partition("=")
        if not part.strip():
            continue
        if not equals:
            raise SpecError([Problem("cluster", f"`cluster` has {part[:60]!r} without a value. Use FIELD=NUMBER.")])
        if name in fields:
            raise SpecError([Problem(f"cluster.{name[:60]}", f"`cluster.{name[:60]}` is set twice. Remove one value.")])
        fields[name] = value.strip() if name == "name" else _parse_number(value)
    return build_own_cluster(fields)


def _parse_number(text: str) -> Any:
    """Parse a JSON number, or return the text, which the model then rejects by its field."""
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return number if isinstance(number, int | float) else text


def build_own_cluster(fields: Mapping[str, Any]) -> Cluster:
    """Return the cluster of an accelerator.

    Raises:
        SpecError: With every field that is missing, unknown, or invalid.
    """
    try:
        own = OwnAccelerator.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise SpecError([convert_error(e, OwnAccelerator, f"cluster.{str(e['loc'][0])[:60]}") for e in found]) from None
    peaks = own.bf16_tflops / BF16_SPEEDUP, own.bf16_tflops
    # The name of a device selects rates of kernels. Rates of another device would be wrong here.
    chip = build_gpu(OWN_NAME, round(own.memory_gb * GB), peaks, own.memory_gb_s / 1000, DEFAULT_SMS)
    cluster = build_gpu_cluster(own.name, chip, own.node_gb_s, own.network_gb_s, per_node=own.gpus_per_node)
    return cluster.model_copy(update={"basis": "own figures"})
