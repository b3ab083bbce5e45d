"""What one rank computes of a layer with one micro-batch: all that memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.cost.resolved_plan import MAX_SHARED_PARTS, MicroBatch
from planner.facts.placements import get_vocab_rows
from planner.facts.precision import FP8_BYTES, get_mixed_precision
from planner.facts.spec import AttentionKernel, ModelSpec, Recompute
from planner.hardware.stacks import STACKS


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """What one rank computes of a layer with one micro-batch. `tokens` of its cp part, `element` bytes of the compute
    type, `narrow` of what products take; `parts` that sequence parallelism divides the residual stream into.
    `documents`: attention stays within them. `fused_loss`, `gathers_logits`, `keeps_opened`, `repeats_operations` and
    `repeats_whole` as the stack has them. `stages`: collectives gather and scatter by way of a copy."""

    model: ModelSpec
    vocab_rows: int
    tokens: int
    sequences: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    cp: int
    ring: bool
    ep: int
    element: int
    recompute: Recompute
    regather: bool
    attention: AttentionKernel
    documents: bool
    dropout: bool
    narrow: int
    fused_loss: bool
    gathers_logits: bool
    keeps_opened: bool
    repeats_operations: bool
    repeats_whole: bool
    stages: bool

    @property
    def parts(self) -> int:
        return self.tp if self.sequence_parallel else 1

    @property
    def hidden_bytes(self) -> int:
        """Hidden states between collectives."""
        return self.tokens * self.model.hidden_size * self.element

    @property
    def part_bytes(self) -> int:
        """Hidden states of the residual stream."""
        return self.hidden_bytes // self.parts

    def staged(self, num_bytes: int) -> int:
        """The copy's, of what is gathered or scattered."""
        return num_bytes if self.stages else 0

    @property
    def rotary_bytes(self) -> int:
        """Cosines and sines of its positions, which a chunk makes once for all its layers."""
        if self.model.arch == "gpt" or self.model.mla:
            return 0
        return self.tokens // self.sequences * self.model.head_size * self.element

    @property
    def embedded_elements(self) -> int:
        """Of the tables that an embedding looks up."""
        model = self.model
        positions = model.max_seq_len if model.arch == "gpt" else 0
        return (self.vocab_rows + positions) * model.hidden_size

    @property
    def light(self) -> bool:
        """Selective recompute where attention is fused: norms and activations are made again."""
        return self.recompute == "selective" and self.attention == "fused" and not self.repeats_operations

    @property
    def by_operation(self) -> bool:
        """Selective recompute that makes a layer again from its input and from outputs of operations."""
        return self.recompute == "selective" and self.repeats_operations


@lru_cache(maxsize=MAX_SHARED_PARTS)
def get_shape(work: MicroBatch) -> Shape:
    """Return the shape of a micro-batch on one rank."""
    spec = work.spec
    layout, train, stack = spec.layout, spec.train, STACKS[spec.resources.stack]
    mix = get_mixed_precision(train.precision)
    return Shape(
        model=spec.model,
        vocab_rows=get_vocab_rows(spec),
        tokens=work.tokens,
        sequences=spec.micro_batch_size,
        seq_len=train.seq_len,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        ring=layout.cp_method == "ring",
        ep=layout.ep,
        element=mix.compute_bytes,
        recompute=layout.recompute,
        regather=layout.regather,
        attention=train.attention,
        documents=train.document_end is not None,
        dropout=train.dropout,
        narrow=FP8_BYTES if mix.gemm == "fp8" else mix.compute_bytes,
        fused_loss=stack.fused_loss or (stack.compiles_loss and train.compile),
        gathers_logits=stack.gathers_logits,
        keeps_opened=stack.keeps_opened,
        repeats_operations=stack.repeats_operations,
        repeats_whole=stack.repeats_whole,
        stages=spec.resources.device == "cpu",  # gloo
    )
