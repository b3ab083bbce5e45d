"""Decide which runs have a single-process reference, and its tolerances."""

from __future__ import annotations

from typing import NamedTuple

from planner.facts.model_shapes import compute_single_pass_flops, count_parameters
from planner.facts.precision import FP32_BYTES, get_mixed_precision
from planner.facts.spec import JobSpec, Layout, Precision
from planner.facts.validation import format_count

COMPARED_STEPS = 3  # The first steps of a run. One more follows at its end.
BYTES_PER_PARAMETER = 24  # fp32 weight, gradient, two moments, and the two compared tensors.
MAX_AUTO_PARAMETERS = 32_000_000  # `verify` auto: 768 MB.
MAX_AUTO_SECONDS = 5.0  # `verify` auto.
# FLOP/s of one CPU core in fp32. Predicted and measured seconds: gpt-mini 3.2 and 2.2, nanogpt 11.0 and 9.9.
CPU_CORE_FLOPS = 40e9
CPU_FP8_SLOWDOWN = 5  # Slowdown compared with fp32. Measured: 5.8 at 512 tokens of 256, 5.0 at 2,048 of 1,024.
GPU_FLOPS = 5e12  # FLOP/s of a GPU in fp32: a quarter of an A100's 19.5 TFLOP/s.
MAX_PARAMETERS = 1_000_000_000  # `verify` on: 24 GB.
MAX_SECONDS = 300.0  # `verify` on. Other ranks wait, and their collectives time out after 10 minutes.


class Tolerances(NamedTuple):
    """Maximum relative differences between a run and its single-process reference.

    `gradient`, `vector`, `router`: gradients of matrices, vectors, and routers.
    `update`, `norm`: parameter updates and gradient norms. Adam amplifies differences of tiny gradients. After a 16-bit
    update with a high learning rate, norms cannot be compared: 11 of 20 correct runs differed by 0.07 to 1.7, although
    their gradients differed by 0.02.
    `loss`, `loss_change`: the loss, plus a fraction of its change since the first step (0.19 and 0.24 in two runs).
    `replicas`: replicas of a tensor.
    `router_choice`: difference of log probabilities of a router's choice, relative to the RMS over all experts.
    `norm_steps`: number of steps whose norms are compared.
    """

    gradient: float
    vector: float
    router: float
    update: float
    loss: float
    norm: float
    replicas: float
    router_choice: float
    loss_change: float = 0.0
    norm_steps: int = COMPARED_STEPS  # of which norms are compared


# Measured with `make parity`: at most 6e-7, 6e-7, 2e-4, 2e-7 and 7e-7. Replicas are bitwise equal.
EXACT = Tolerances(
    gradient=1e-5, vector=1e-5, router=1e-5, update=1e-3, loss=1e-4, norm=1e-3, replicas=1e-6, router_choice=1e-3
)
EXACT_LATER = EXACT._replace(gradient=1e-3, vector=1e-3, router=1e-3, update=3e-3, loss=1e-3)
COMPILED_REPLICAS = 1e-2  # In 16 bits, autotuning can choose different kernels per rank.
# bf16 compared with bf16 on CPUs, if each rank computes whole matmuls and sums gradients in fp32 (dp, pp): the first
# step is equal except for the order of these sums (measured with dp 2, ZeRO-1: 8e-10 in gradients, 0 in updates). Later
# steps round weights that differ by as little.
WHOLE_MATMUL_TOLERANCES = EXACT._replace(loss=1e-3, norm_steps=1)
# bf16 compared with bf16, if tp, cp, or ep divides matmuls or their sums: gradients of tp 2 differ by 0.008, updates by
# 5e-5, norms by 3e-5. The reference has fused attention, so gradients with unfused attention differ by 0.007.
SPLIT_MATMUL_TOLERANCES = Tolerances(
    gradient=0.05,
    vector=0.1,
    router=0.2,
    update=0.02,
    loss=2e-3,
    norm=0.01,
    replicas=EXACT.replicas,
    router_choice=0.3,
    loss_change=0.05,
    norm_steps=1,
)
# bf16 compared with fp32: gradients differ by 0.03 in 12 dense runs on gloo and 0.02 on an H100. A router's gradient
# nearly cancels: 0.11. Updates of 53 random layouts, a third of them in bf16 only: 0.2.
BF16_TOLERANCES = Tolerances(
    gradient=0.1,
    vector=0.2,
    router=0.3,
    update=0.4,
    loss=5e-3,
    norm=0.05,
    replicas=EXACT.replicas,
    router_choice=0.3,
    loss_change=0.3,
    norm_steps=1,
)
# fp8 compared with fp8, whose sums are rounded differently before the cast: 0.07 for matrices of 8 layers, 0.11 for 24
# layers, updates 0.24, losses 0.0012, norms 0.023. A missing sum gives 0.6 or more.
FP8_TOLERANCES = BF16_TOLERANCES._replace(gradient=0.3, vector=0.5, router=0.5, update=0.5, loss=0.01, norm=0.1)
MAX_FINAL_BATCHES = 3  # Maximum batches of the final comparison, which stops at the first within tolerance.


def get_tolerances(spec: JobSpec) -> Tolerances:
    """Return the tolerances of a run that starts from its initial values, for a reference in the same precision."""
    if spec.train.precision == "fp32":
        return EXACT
    mix, layout = get_mixed_precision(spec.train.precision), spec.layout
    if mix.gemm == "fp8":
        most = FP8_TOLERANCES
    elif mix.gradient_bytes != FP32_BYTES or spec.train.compile:
        most = BF16_TOLERANCES
    elif layout.tp * layout.cp * layout.ep > 1 or _splits_tied_embedding(spec) or spec.train.attention == "unfused":
        most = SPLIT_MATMUL_TOLERANCES
    elif spec.resources.device == "cuda":
        most = SPLIT_MATMUL_TOLERANCES  # kernels of GPUs do not always sum in the same order
    else:
        most = WHOLE_MATMUL_TOLERANCES
    return most._replace(replicas=COMPILED_REPLICAS) if spec.train.compile else most


def _splits_tied_embedding(spec: JobSpec) -> bool:
    """Return whether two stages sum gradients in fp32 that autograd of a single process sums in 16 bits."""
    return spec.model.tied_embeddings and spec.layout.pp > 1


def needs_fp32_reference(spec: JobSpec) -> bool:
    """Return whether the first steps are also compared with an fp32 reference.

    The reference in the precision of the run has the same rounding, and the same faults of rounding, as the run. fp8
    matmuls differ from fp32 by 6%, and 16-bit weights lose updates below their resolution.
    """
    mix = get_mixed_precision(spec.train.precision)
    return mix.gemm == "bf16" and mix.has_master_weights


def get_resumed_tolerances(spec: JobSpec) -> Tolerances:
    """Return the tolerances of the first steps of a resumed run.

    They depend on the batch that the run resumes with. Measured bf16 differences from trained values, with a bf16
    reference: 0 in dp 2 and pp 2, 0.016 in cp 2 (145 steps), at most 0.16 in tp 2 (174 steps, others 0.04), and at most
    0.30 in tp 4 (19 steps). fp8: at most 0.37 in tp 2 (19 steps). A missing or doubled gradient differs by 1.
    Checksums verify the loaded values, and the final comparison uses more batches.
    """
    most = get_tolerances(spec)
    if is_exact(most):
        return EXACT_LATER
    return most._replace(gradient=0.9, vector=0.9, router=0.9, update=BF16_TOLERANCES.update, norm=0.5)


def get_final_tolerances(spec: JobSpec) -> Tolerances:
    """Return the tolerances of a step after the last, for the best of several batches."""
    most = get_tolerances(spec)
    if is_exact(most):
        return EXACT_LATER
    return BF16_TOLERANCES if most == SPLIT_MATMUL_TOLERANCES else most


def get_num_final_batches(spec: JobSpec) -> int:
    """Return the maximum batches of the final comparison.

    Several batches are needed if rounding can dominate the gradient of one batch.
    """
    return 1 if is_exact(get_tolerances(spec)) else MAX_FINAL_BATCHES


def is_exact(tolerances: Tolerances) -> bool:
    """Return whether only the order of fp32 sums differs from the reference."""
    return tolerances.gradient == EXACT.gradient


def format_tolerances(spec: JobSpec, most: Tolerances, reference_precision: Precision) -> str:
    """Format the tolerances of a run.

    Example: 'bf16 allows relative differences from a fp32 single-process reference of 0.1 in gradients (0.2 in
    vectors), 0.4 in updates'.
    """
    whose = "rounding" if is_exact(most) else spec.train.precision
    others = [f"{most.vector:g} in vectors"] if most.vector != most.gradient else []
    others += [f"{most.router:g} in routers"] if spec.model.moe and most.router != most.gradient else []
    parts = [f"{most.gradient:g} in gradients" + (f" ({', '.join(others)})" if others else "")]
    parts += [f"{most.update:g} in updates"]
    parts += [
        f"{most.loss:g} in losses" + (f" plus {most.loss_change:g} of the loss change" if most.loss_change else "")
    ]
    parts += [f"{most.norm:g} in {'the first gradient norm' if most.norm_steps == 1 else 'gradient norms'}"]
    parts += [f"{most.router_choice:g} in router choices"] if spec.model.moe else []
    reference = f"a {reference_precision} single-process reference"
    return f"{whose} allows relative differences from {reference} of {', '.join(parts)}"


def make_reference_spec(spec: JobSpec, precision: Precision | None = None) -> JobSpec:
    """Return the spec of the single-process reference, by default in the precision of the run.

    It has micro-batches of the same size, saves nothing, and compiles only if that changes the rounding.
    """
    micro_batches = spec.train.global_batch // spec.micro_batch_size
    precision = precision or spec.train.precision
    compiles = spec.train.compile and precision != "fp32"
    plain = {"micro_batches": micro_batches, "precision": precision, "compile": compiles, "attention": "fused"}
    train = spec.train.model_copy(update={**plain, "resume": None, "checkpoint_every": 0, "verify": "off"})
    return spec.model_copy(update={"layout": Layout(), "train": train})


def estimate_reference_seconds(spec: JobSpec) -> float:
    """Return the estimated time of the compared steps on one CPU core or one GPU."""
    rate = CPU_CORE_FLOPS if spec.resources.device == "cpu" else GPU_FLOPS
    if needs_fp32_reference(spec):
        rate /= 2  # for two references
    if spec.resources.device == "cpu" and get_mixed_precision(spec.train.precision).gemm == "fp8":
        rate /= CPU_FP8_SLOWDOWN
    return min(COMPARED_STEPS, spec.train.steps) * compute_single_pass_flops(spec) / rate


def explain_no_reference(spec: JobSpec) -> str:
    """Return why a run has no single-process reference, or an empty text if it has one."""
    if spec.train.verify == "off":
        return "`train.verify` is off"
    if spec.train.verify == "on":
        return ""
    return _explain_exceeded_limit(spec, MAX_AUTO_PARAMETERS, MAX_AUTO_SECONDS, "auto")


def explain_oversized_reference(spec: JobSpec) -> str:
    """Return why the requested single-process reference is too large, or an empty text."""
    if spec.train.verify != "on":
        return ""
    return _explain_exceeded_limit(spec, MAX_PARAMETERS, MAX_SECONDS, "on")


def _explain_exceeded_limit(spec: JobSpec, most: int, longest_s: float, when: str) -> str:
    count, seconds = count_parameters(spec.model), estimate_reference_seconds(spec)
    if count > most:
        need = f"{BYTES_PER_PARAMETER} B x {count:,} parameters = {BYTES_PER_PARAMETER * count / 1e9:,.1f} GB"
        limit = f"The limit with `train.verify` {when} is {most:,} parameters."
        return f"the single-process reference needs {need}. {limit}"
    if seconds > longest_s:
        steps = min(COMPARED_STEPS, spec.train.steps)
        took = f"the single-process reference needs about {seconds:,.0f} s for {format_count(steps, 'step')}"
        return f"{took}. The limit with `train.verify` {when} is {longest_s:.0f} s."
    return ""
