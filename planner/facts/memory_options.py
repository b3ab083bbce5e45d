"""Define methods that lower the memory of training, for estimates only. Meshboard's trainer has none of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.facts.validation import StrictModel

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
