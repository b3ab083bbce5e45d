"""What can be planned but not run yet: the trainer's own limits, told before anything is launched."""

from __future__ import annotations

from planner.facts.precision import mix_of
from planner.facts.schedules import splits
from planner.facts.spec import JobSpec, Problem


def not_runnable(spec: JobSpec) -> list[Problem]:
    """Every field whose value the trainer does not implement. Empty means that a valid spec can be submitted."""
    model, layout, train = spec.model, spec.layout, spec.train
    found = []

    def refuse(field: str, what: str) -> None:
        found.append(Problem(field, f"{what} can be planned, but not run yet"))

    if model.mla:
        refuse("model.mla", "latent attention")
    if model.moe and model.moe.router_bias:
        refuse("model.moe.router_bias", "a router with a bias an expert")
    if mix_of(train.precision).gemm == "fp8" or train.precision == "bf16_state":
        refuse("train.precision", f"precision {train.precision}")
    if layout.cp > 1 and train.attention != "fused":
        refuse("train.attention", "attention that keeps every score with context parallelism")
    if layout.zero and not train.overlap:
        refuse("train.overlap", "reducing gradients only after backward under ZeRO")
    if train.compile and (unfit := _not_compiled(spec)):
        refuse("train.compile", f"compiling blocks with {' and '.join(unfit)}")
    if spec.resources.stack != "ours":
        refuse("resources.stack", f"software other than ours ({spec.resources.stack})")
    if train.dropout:
        refuse("train.dropout", "dropout")
    return found


def _not_compiled(spec: JobSpec) -> list[str]:
    """What of a block torch.compile is kept away from: weights whose gradients come later, what is made again."""
    layout = spec.layout
    told = {
        "a schedule that splits backward": splits(layout),
        "selective recompute": layout.recompute == "selective",
        "inputs gathered again": layout.regather,
        "experts": spec.model.moe is not None,
        "attention within documents": spec.train.document_end is not None,
    }
    return [what for what, is_so in told.items() if is_so]
