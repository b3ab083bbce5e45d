"""Which runs are also computed by one process, and how near to it they must come."""

from __future__ import annotations

from typing import NamedTuple

from planner.facts.model_shapes import parameter_count, single_flops
from planner.facts.precision import mix_of
from planner.facts.spec import JobSpec, Layout, Precision
from planner.facts.validation import counted

STEPS = 3  # the first ones of a run; and one more at its end
BYTES_A_PARAMETER = 24  # in one process: fp32 weight, gradient, two moments, and the two tensors that are compared
MOST_PARAMETERS = 32_000_000  # without being asked: 768 MB
MOST_SECONDS = 5.0  # without being asked
CORE_FLOPS = 40e9  # of one CPU core in fp32: gpt-mini told 3.2 s and took 2.2, nanogpt told 11.0 and took 9.9
FP8_ON_A_CPU = 5  # times as long as fp32: 5.8 at 512 tokens of 256, 5.0 at 2,048 of 1,024
GPU_FLOPS = 5e12  # of a GPU in fp32: a quarter of an A100's 19.5 TFLOP/s
LARGEST_PARAMETERS = 1_000_000_000  # when asked: 24 GB
LONGEST_SECONDS = 300.0  # when asked: the other ranks wait, and after 10 minutes they give up


class Limits(NamedTuple):
    """Largest relative differences that are rounding; of gradients, those of matrices, vectors and routers.

    Of norms and updates Adam makes more: it takes a whole step where a gradient is nearly nothing. After an update in
    16 bits at a high rate no norm can be foretold: 0.07 to 1.7 apart in 11 of 20 runs that trained right, whose
    gradients had been 0.02 apart. A loss may be off by a share of its `change` since the first step: 0.19 and 0.24 of
    two such. A `choice` of a router's is rounding where what it left was more probable by no more: a difference of
    logarithms over the rms of all experts'.
    """

    gradient: float
    vector: float
    router: float
    update: float
    loss: float
    norm: float
    copies: float
    choice: float
    change: float = 0.0
    norm_steps: int = STEPS  # of which norms are compared


# `make parity`: at most 6e-7, 6e-7, 2e-4, 2e-7 and 7e-7 of its core; copies are equal bit for bit.
EXACT = Limits(gradient=1e-5, vector=1e-5, router=1e-5, update=0.01, loss=1e-4, norm=1e-3, copies=1e-6, choice=1e-3)
LATER = EXACT._replace(gradient=1e-3, vector=1e-3, router=1e-3, update=3e-3, loss=1e-3)
COMPILED_COPIES = 1e-2  # in 16 bits, where each rank times kernels of its own and may choose others
# bf16 beside one process in fp32: 0.03 of all of 12 dense runs on gloo, 0.02 on an H100. A router's
# is a sum of what nearly cancels: 0.11. Updates of 53 random layouts, a third of them all in bf16: 0.2.
ROUNDED = Limits(
    gradient=0.1,
    vector=0.2,
    router=0.3,
    update=0.4,
    loss=5e-3,
    norm=0.05,
    copies=EXACT.copies,
    choice=0.3,
    change=0.3,
    norm_steps=1,
)
# fp8 beside one process in fp8, whose sums are rounded otherwise before they are cast: 0.07 of 8 layers' matrices, 0.11
# of 24, updates 0.24, losses 0.0012, norms 0.023. A sum that is missing is 0.6 or more.
NARROW = ROUNDED._replace(gradient=0.3, vector=0.5, router=0.5, update=0.5, loss=0.01, norm=0.1)
END_BATCHES = 3  # at most, of which the end is held against the first that is within its limits


def limits(spec: JobSpec) -> Limits:
    """For the spec's precision, from its own initial values, beside one process in `reference_precision`."""
    if spec.train.precision == "fp32":
        return EXACT
    most = NARROW if mix_of(spec.train.precision).gemm == "fp8" else ROUNDED
    return most._replace(copies=COMPILED_COPIES) if spec.train.compile else most


def resumed_limits(spec: JobSpec) -> Limits:
    """The same of the first steps of a run that goes on, by the batch that it happens to go on with.

    From trained values, beside one process as narrow, bf16 was equal bit for bit in dp 2 and pp 2, 0.016 apart in cp 2
    (145 steps), once 0.16 in tp 2 (174; else 0.04) and once 0.30 in tp 4 (19), fp8 once 0.37 in tp 2 (19). One that is
    missing or doubled is 1 apart. What it loaded is held against checksums, and its end against more batches.
    """
    most = limits(spec)
    return LATER if most == EXACT else most._replace(gradient=0.9, vector=0.9, router=0.9, norm=0.5)


def end_limits(spec: JobSpec) -> Limits:
    """The same of a step after the last, by the best of `end_batches`."""
    most = limits(spec)
    return LATER if most == EXACT else most


def end_batches(spec: JobSpec) -> int:
    """How many may be asked, where rounding may be much of one batch's gradient."""
    return 1 if limits(spec) == EXACT else END_BATCHES


def limits_words(spec: JobSpec, most: Limits, *, trained: bool) -> str:
    """Return the limits, such as 'bf16 allows relative differences from a fp32 single-process reference of 0.1 in
    gradients (0.2 in vectors), 0.4 in updates'."""
    whose = "rounding" if spec.train.precision == "fp32" else spec.train.precision
    others = [f"{most.vector:g} in vectors"] if most.vector != most.gradient else []
    others += [f"{most.router:g} in routers"] if spec.model.moe and most.router != most.gradient else []
    told = [f"{most.gradient:g} in gradients" + (f" ({', '.join(others)})" if others else "")]
    told += [f"{most.update:g} in updates"]
    told += [f"{most.loss:g} in losses" + (f" plus {most.change:g} of the loss change" if most.change else "")]
    told += [f"{most.norm:g} in {'the first gradient norm' if most.norm_steps == 1 else 'gradient norms'}"]
    told += [f"{most.choice:g} in router choices"] if spec.model.moe else []
    computed = reference_precision(spec.train.precision, trained=trained)
    return f"{whose} allows relative differences from a {computed} single-process reference of {', '.join(told)}"


def reference_precision(precision: Precision, *, trained: bool = False) -> Precision:
    """What the one process computes in: fp32, but for what fp32 says nothing of. Products in fp8 are 6% off by
    themselves, and weights held in bf16 lose whole updates that are less than they can tell apart. And from `trained`
    values gradients of tokens all but cancel, where rounding, which is the same wherever a token stands, does not."""
    mix = mix_of(precision)
    return precision if trained or mix.gemm == "fp8" or not mix.has_master else "fp32"


def alone(spec: JobSpec, *, trained: bool = False) -> JobSpec:
    """The same training on one rank in `reference_precision`, in micro-batches of the same size; nothing is saved, and
    nothing compiled unless that would round otherwise."""
    micro_batches = spec.train.global_batch // spec.micro_batch_size
    precision = reference_precision(spec.train.precision, trained=trained)
    compiles = spec.train.compile and trained and precision != "fp32"
    plain = {"micro_batches": micro_batches, "precision": precision, "compile": compiles, "attention": "fused"}
    train = spec.train.model_copy(update={**plain, "resume": None, "checkpoint_every": 0, "verify": "off"})
    return spec.model_copy(update={"layout": Layout(), "train": train})


def seconds_alone(spec: JobSpec) -> float:
    """Estimated time of the compared steps on one core, or one GPU."""
    rate = CORE_FLOPS if spec.resources.device == "cpu" else GPU_FLOPS
    if spec.resources.device == "cpu" and mix_of(spec.train.precision).gemm == "fp8":
        rate /= FP8_ON_A_CPU
    return min(STEPS, spec.train.steps) * single_flops(spec) / rate


def why_not_compared(spec: JobSpec) -> str:
    """Why a run is not also computed by one process; empty where it is."""
    if spec.train.verify == "off":
        return "`train.verify` is off"
    if spec.train.verify == "on":
        return ""
    return _beyond(spec, MOST_PARAMETERS, MOST_SECONDS, "auto")


def why_not_asked(spec: JobSpec) -> str:
    """Why one process cannot be asked to compute the spec; empty where it can, or is not."""
    if spec.train.verify != "on":
        return ""
    return _beyond(spec, LARGEST_PARAMETERS, LONGEST_SECONDS, "on")


def _beyond(spec: JobSpec, most: int, longest_s: float, when: str) -> str:
    count, seconds = parameter_count(spec.model), seconds_alone(spec)
    if count > most:
        need = f"{BYTES_A_PARAMETER} B x {count:,} parameters = {BYTES_A_PARAMETER * count / 1e9:,.1f} GB"
        limit = f"The limit with `train.verify` {when} is {most:,} parameters."
        return f"the single-process reference needs {need}. {limit}"
    if seconds > longest_s:
        steps = min(STEPS, spec.train.steps)
        took = f"the single-process reference needs about {seconds:,.0f} s for {counted(steps, 'step')}"
        return f"{took}. The limit with `train.verify` {when} is {longest_s:.0f} s."
    return ""
