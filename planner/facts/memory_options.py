"""Define methods that lower the memory of training, for estimates only. Meshboard's trainer has none of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.facts.validation import Problem, StrictModel

Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"]
LoraTargets = Literal["attention", "all_linear"]
FrozenWeights = Literal["own", "int8", "nf4"]
Offload = Literal["none", "optimizer", "optimizer_and_parameters"]


class MemoryOptions(StrictModel):
    """Methods that lower the memory of training, for estimates only."""

    optimizer: Optimizer = Field(
        default="adamw",
        description="optimizer: adamw, adamw_8bit and paged_adamw_8bit (bitsandbytes), adafactor, or muon",
    )
    optimizer_in_backward: bool = Field(
        default=False, description="update each weight in backward and free its gradient; needs one micro-batch"
    )
    lora_rank: int | None = Field(
        default=None, ge=1, le=65536, description="rank of LoRA adapters; all other weights are frozen"
    )
    lora_targets: LoraTargets = Field(
        default="all_linear", description="matrices with LoRA adapters: of attention, or of all linear layers"
    )
    frozen_weights: FrozenWeights = Field(
        default="own",
        description="number type of frozen matrices: own (as in the precision), int8 (LLM.int8), or nf4 (QLoRA)",
    )
    offload: Offload = Field(
        default="none", description="model state in CPU memory: none, optimizer, or optimizer_and_parameters"
    )
    offload_activations: bool = Field(
        default=False, description="move the activations that layers keep for backward to CPU memory"
    )
    chunked_loss: bool = Field(default=False, description="compute logits and loss in eight chunks of the tokens")


def find_memory_problems(options: MemoryOptions, hidden_size: int, micro_batches: int, precision: str) -> list[Problem]:
    """Return the options that contradict each other, the model, or the training."""
    found = []
    if options.lora_rank is None and options.frozen_weights != "own":
        text = f"`memory.frozen_weights` is {options.frozen_weights}, but no weights are frozen. "
        found.append(Problem("memory.frozen_weights", f"{text}Set memory.lora_rank, or use own."))
    if options.lora_rank is not None and options.lora_rank > hidden_size:
        text = f"`memory.lora_rank` is {options.lora_rank}. Use at most hidden_size {hidden_size}."
        found.append(Problem("memory.lora_rank", text))
    if options.optimizer_in_backward and micro_batches > 1:
        text = f"`memory.optimizer_in_backward` needs one micro-batch, but micro_batches is {micro_batches}. "
        found.append(Problem("memory.optimizer_in_backward", f"{text}Set micro_batches to 1, or turn it off."))
    if precision.startswith("fp8"):
        found.append(Problem("memory", "`memory` is set, but fp8 is not supported. Use fp32 or a bf16 precision."))
    return found
