"""The memory of tensor parallelism (2104.04473 section 2.3) and sequence parallelism (2205.05198 section 4.2.2).

Functions that take a tensor leave it to the caller, except where they say that they drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.memory.autograd import (
    Graph,
    Recomputed,
    Tensor,
    cast,
    compute_input_gradient,
    compute_weight_gradients,
)
from planner.cost.memory.tape import ACTIVATIONS, BUFFERS, GRADIENTS, WORKING
from planner.cost.resolved_plan import MicroBatch


class LayerInput(NamedTuple):
    """Input of a sublayer: `local` as the rank has it, and the `whole` input of its matmuls."""

    local: Tensor
    whole: Tensor


def run_norm(g: Graph, x: Tensor) -> Tensor:
    """Record a LayerNorm or RMSNorm, which saves its input."""
    return g.apply((x,), x.num_bytes, saves=(x,))


def gather_input(g: Graph, batch: MicroBatch, x: Tensor) -> LayerInput:
    """Return the input of column-parallel matmuls, which sequence parallelism gathers."""
    if batch.tp > 1 and batch.sequence_parallel:
        return LayerInput(x, _gather(g, batch))
    return LayerInput(x, Tensor(g.tape.hold(x.buffer)))


def _gather(g: Graph, batch: MicroBatch) -> Tensor:
    """Allocate gathered hidden states. Shards of several sequences are copied into order."""
    shards = g.allocate(batch.hidden_bytes)
    g.tape.touch(batch.get_staging_bytes(batch.hidden_bytes), BUFFERS)
    if batch.sequences == 1:
        return shards
    out = g.allocate(batch.hidden_bytes)
    g.drop(shards)
    return out


def regather(batch: MicroBatch, x: LayerInput, *, extra: int = 0) -> Recomputed:
    """Return the whole input as backward gathers it again. `extra`: bytes of a norm that is recomputed too."""
    size = x.whole.num_bytes
    if batch.tp == 1 or not batch.sequence_parallel:
        return Recomputed(size, 0)
    return Recomputed(size, extra + (size if batch.sequences > 1 else batch.get_staging_bytes(size)))


def copy_to_tensor_ranks(g: Graph, batch: MicroBatch, x: LayerInput) -> Tensor:
    """Return the whole input as a tensor whose gradient backward sums over tp."""
    tape = g.tape
    out = Tensor(tape.hold(x.whole.buffer))
    out.recomputed = x.whole.recomputed

    def all_reduce() -> None:
        grad = g.take_grad(out)
        if batch.tp > 1:
            total = tape.take(x.local.num_bytes, WORKING)
            tape.drop(grad)
            grad = total
        g.add_grad(x.local, grad)

    def reduce_scatter() -> None:
        grad = g.take_grad(out)
        shards = tape.take(batch.hidden_bytes, BUFFERS) if batch.sequences > 1 else None
        total = tape.take(x.local.num_bytes, WORKING)
        tape.touch(batch.get_staging_bytes(batch.hidden_bytes), BUFFERS)
        tape.drop(grad, *([shards] if shards else []))
        g.add_grad(x.local, total)

    g.record(reduce_scatter if batch.tp > 1 and batch.sequence_parallel else all_reduce)
    return out


class Matmul(NamedTuple):
    """Column-parallel matmul with a weight of `weight` elements and an output of `num_bytes`.

    `clones`: the gradient arrives in another order of elements. `narrow`: the matmul may use fp8.
    """

    num_bytes: int
    weight: int
    clones: bool = False
    narrow: bool = True
    part: int = ACTIVATIONS


def run_column_parallel(g: Graph, batch: MicroBatch, x: LayerInput, matmuls: Sequence[Matmul]) -> list[Tensor]:
    """Record column-parallel matmuls of one input.

    Over several ranks they are one operation. Its backward sums the gradient of the input while it computes those of
    the weights, unless weight gradients wait.
    """
    narrow = g.narrow and all(m.narrow for m in matmuls)
    if g.waits or (batch.tp == 1 and not narrow):
        whole = copy_to_tensor_ranks(g, batch, x)
        outs = [g.linear(whole, m.num_bytes, m.weight, clones=m.clones, narrow=narrow, part=m.part) for m in matmuls]
        g.drop(whole)
        return outs
    tape, saved, numel = g.tape, g.save(x.whole), batch.hidden_bytes // g.element
    outs, sizes = [], [m.weight for m in matmuls]
    inputs = [cast(tape, numel, g.element)] if narrow else []
    for matmul in matmuls:
        operand = [cast(tape, matmul.weight, g.element)] if narrow else []
        outs.append(g.allocate(matmul.num_bytes, matmul.part))
        tape.drop(*operand)
    tape.drop(*inputs)

    def backward() -> None:
        grads = [g.take_grad(out) for out in outs]
        g.recompute(saved)
        rows = [tape.take(m.num_bytes, WORKING) for m in matmuls if m.clones]
        casts = [cast(tape, m.num_bytes // g.element, g.element) for m in matmuls] if narrow else []
        if narrow:
            whole = compute_input_gradient(tape, batch.hidden_bytes, g.element, sizes)
        else:
            whole = tape.take(batch.hidden_bytes, WORKING)
        if batch.tp > 1 and batch.sequence_parallel:
            sent = [tape.take(batch.hidden_bytes, BUFFERS) if batch.sequences > 1 else tape.hold(whole)]
            total = tape.take(x.local.num_bytes, WORKING)
            sent.append(tape.take(batch.get_staging_bytes(batch.hidden_bytes), BUFFERS))
            tape.drop(whole)
        else:
            sent, total = [whole], tape.hold(whole)
        if narrow:
            weights = compute_weight_gradients(tape, numel, g.element, casts, sizes)
        else:
            weights = [tape.take(weight * g.element, GRADIENTS) for weight in sizes]
        tape.drop(*grads, *rows, *casts, *sent)
        g.release(saved)
        for made, matmul in zip(weights, matmuls, strict=True):
            g.accumulate(made, matmul.weight)
        g.add_grad(x.local, total)

    g.record(backward)
    return outs


def reduce_output(g: Graph, batch: MicroBatch, x: Tensor) -> Tensor:
    """Record the sum of a row-parallel matmul over tp. Drops x."""
    if batch.tp == 1:
        return x
    tape, copies = g.tape, batch.sequence_parallel and batch.sequences > 1
    shards = tape.take(batch.hidden_bytes if copies else 0, BUFFERS)
    out = g.allocate(x.num_bytes // batch.num_shards)
    if batch.sequence_parallel:
        tape.touch(batch.get_staging_bytes(batch.hidden_bytes), BUFFERS)
    tape.drop(shards)
    g.drop(x)

    def backward() -> None:
        grad = g.take_grad(out)
        if batch.sequence_parallel:
            made = _gather(g, batch).buffer
            tape.drop(grad)
            grad = made
        g.add_grad(x, grad)

    g.record(backward)
    return out
