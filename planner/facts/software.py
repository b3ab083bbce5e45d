"""What a spec may say of the software that it is planned for: of each stack what it leaves open, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.facts.precision import mix_of
from planner.facts.resources import SoftwareKernel, SoftwareSpec, StackName
from planner.facts.spec import JobSpec, Problem
from planner.facts.words import alternatives

# Values beside a field's default that published rows of the stack have shown to matter.
ANY: tuple[Any, ...] = ()
OPEN: dict[StackName, dict[str, tuple[Any, ...]]] = {
    "megatron": {
        "cuda_graphs": ANY,
        "deterministic": ANY,
        "dispatcher": ANY,
        "overlap_experts": ANY,
        "attention_kernel": ("flash_2",),
        "nvfp4": ANY,
    },
    "scaling": {"attention_kernel": ("flash_1", "eager"), "fused_norms": ANY},
}
OF_EXPERTS = ("dispatcher", "overlap_experts")
UNFUSED: tuple[SoftwareKernel, ...] = ("eager",)


def said(software: SoftwareSpec | None) -> dict[str, Any]:
    """What differs from what the stack is planned with anyway."""
    return {} if software is None else software.model_dump(exclude_defaults=True)


def open_to(stack: StackName) -> tuple[str, ...]:
    """Fields that a spec may say of the stack."""
    return tuple(OPEN.get(stack, {}))


def software_problems(spec: JobSpec) -> list[Problem]:
    """Every field that the stack does not leave open, or that the model or its attention contradicts."""
    found = ((f"resources.software.{name}", text) for name, text in _refused(spec))
    return [Problem(field, f"`{field}` is {text}.") for field, text in found]


def _refused(spec: JobSpec) -> Iterator[tuple[str, str]]:
    stack = spec.resources.stack
    for name, value in said(spec.resources.software).items():
        values = OPEN.get(stack, {}).get(name)
        if values is None:
            yield name, f"set, but `resources.stack` is {stack}. Omit it, or use {_owners(name)}"
        elif values and value not in values:
            yield name, f"{value}. For {stack}, use {alternatives(['own', *values])}"
        elif name in OF_EXPERTS and spec.model.moe is None:
            yield name, "set, but the model has no experts. Omit it"
        elif name == "nvfp4" and mix_of(spec.train.precision).gemm != "fp8":
            yield name, f"on, but `train.precision` is {spec.train.precision}. Use an fp8 precision, or turn it off"
        elif name == "attention_kernel" and (value in UNFUSED) != (spec.train.attention == "unfused"):
            kind = "unfused" if value in UNFUSED else "fused"
            yield name, f"{value}, but `train.attention` is {spec.train.attention}. Set `train.attention` to {kind}"


def _owners(name: str) -> str:
    return " or ".join(stack for stack, fields in OPEN.items() if name in fields)


_WORDS: dict[str, dict[Any, str]] = {
    "cuda_graphs": {
        "router": "CUDA graphs of the router",
        "attention": "CUDA graphs of attention",
        "attention_and_router": "CUDA graphs of attention and router",
        "whole": "CUDA graphs of whole layers or steps",
    },
    "deterministic": {True: "deterministic kernels"},
    "dispatcher": {"alltoall": "all-to-all token dispatch"},
    "overlap_experts": {True: "overlapped expert communication"},
    "attention_kernel": {
        "flash_1": "FlashAttention 1",
        "flash_2": "FlashAttention 2",
        "eager": "unfused attention",
    },
    "fused_norms": {True: "fused norms"},
    "nvfp4": {True: "NVFP4 matmuls"},
}


def software_words(software: SoftwareSpec | None) -> str:
    """Return ', CUDA graphs of attention, all-to-all token dispatch'. Empty without options."""
    return "".join(f", {_WORDS[name][value]}" for name, value in said(software).items())
