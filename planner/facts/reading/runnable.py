"""What can be planned but not run yet: the trainer's own limits, told before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator

from planner.facts.precision import mix_of
from planner.facts.schedules import splits
from planner.facts.spec import JobSpec, Problem
from planner.facts.tensors.placements import kv_heads_held
from planner.facts.tensors.shards import micro_batch_tokens

FP8_ALIGNED = 16  # what torch's scaled product takes on a GPU


def not_runnable(spec: JobSpec) -> list[Problem]:
    """Every field whose value the trainer does not implement. Empty means that a valid spec can be submitted."""
    model, layout, train = spec.model, spec.layout, spec.train
    found = []

    def refuse(field: str, what: str) -> None:
        text = f"`{field}`: the trainer does not support {what}. Change this field, or only plan the layout."
        found.append(Problem(field, text))

    if model.mla:
        refuse("model.mla", "latent attention")
    if model.moe and model.moe.router_bias:
        refuse("model.moe.router_bias", "router biases")
    if model.moe and model.moe.expert_bias:
        refuse("model.moe.expert_bias", "biases in experts")
    if model.moe and model.moe.swiglu_limit is not None:
        refuse("model.moe.swiglu_limit", "clamped experts")
    if model.head_dim is not None and model.num_heads * model.head_dim != model.hidden_size:
        sizes = f"{model.num_heads} heads of size {model.head_dim} with hidden size {model.hidden_size}"
        refuse("model.head_dim", sizes)
    if model.sliding_window is not None:
        refuse("model.sliding_window", "sliding-window attention")
    if mix_of(train.precision).gemm == "fp8":
        if model.moe:
            refuse("train.precision", f"precision {train.precision} with experts")
        for side in _unaligned(spec):
            refuse("train.precision", f"precision {train.precision} with {side}")
    if layout.zero and not train.overlap:
        refuse("train.overlap", "gradient reduction after backward with ZeRO")
    if train.compile and (unfit := _not_compiled(spec)):
        refuse("train.compile", f"torch.compile with {' and '.join(unfit)}")
    if spec.resources.stack != "ours":
        refuse("resources.stack", f"the {spec.resources.stack} stack")
    if train.dropout:
        refuse("train.dropout", "dropout")
    return found


def _unaligned(spec: JobSpec) -> Iterator[str]:
    """Sides of layers' products that no kernel in fp8 takes."""
    model, tp = spec.model, spec.layout.tp
    heads, keys = model.num_heads // tp, kv_heads_held(model.num_kv_heads, tp)
    sides = {
        "model.hidden_size": ("", model.hidden_size),
        "queries": (f"{heads} heads of {model.head_size} = ", heads * model.head_size),
        "keys": (f"{keys} heads of {model.head_size} = ", keys * model.head_size),
        "an MLP": (f"{model.ffn_hidden_size} / tp {tp} = ", model.ffn_hidden_size // tp),
        "a micro-batch": ("", micro_batch_tokens(spec)),
    }
    for name, (sum_, size) in sides.items():
        if size % FP8_ALIGNED:
            unit = "tokens" if name == "a micro-batch" else "columns"
            yield f"{sum_}{size} {unit} per rank in {name}, which is not a multiple of {FP8_ALIGNED}"


def _not_compiled(spec: JobSpec) -> list[str]:
    """What of a block torch.compile is kept away from: weights whose gradients come later, what is made again."""
    layout = spec.layout
    told = {
        "a schedule that splits backward": splits(layout),
        "selective recompute": layout.recompute == "selective",
        "regathered inputs": layout.regather,
        "experts": spec.model.moe is not None,
        "attention within documents": spec.train.document_end is not None,
    }
    return [what for what, is_so in told.items() if is_so]
