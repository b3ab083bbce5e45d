"""The memory of each piece of a chunk on a separate tape: the embedding, a layer, and the head with its loss."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from planner.cost.memory.autograd import GradientSum, Graph, Segment, Tensor
from planner.cost.memory.layer import run_layer
from planner.cost.memory.tape import BUFFERS, EMPTY, GRADIENTS, LOGITS, WORKING, Stretch, Tape, join
from planner.cost.memory.tensor_parallel import Matmul, gather_input, regather, run_column_parallel, run_norm
from planner.cost.resolved_plan import MicroBatch
from planner.facts.precision import FP32_BYTES


class RecordedPiece(NamedTuple):
    """Stretches of a piece. Forward replaces the input by the output, and backward does so with gradients.

    Attributes:
        weights: computes weight gradients, if they wait.
        accumulation: adds the weight gradients to earlier ones, if they wait.
        segments: the parts of backward up to each weight gradient, if they do not wait.
    """

    forward: Stretch
    backward: Stretch
    weights: Stretch = EMPTY
    accumulation: Stretch = EMPTY
    loss: Stretch = EMPTY
    loss_backward: Stretch = EMPTY
    segments: tuple[Segment, ...] = ()


@cache
def record_layer(
    batch: MicroBatch,
    sums: GradientSum,
    *,
    moe: bool,
    waits: bool,
    experts: GradientSum | None = None,
    input_held: bool = False,
    gradient_held: bool = False,
) -> RecordedPiece:
    """Return the stretches of a layer.

    Args:
        experts: what happens to gradients of experts, if not `sums`.
        input_held: the pipeline keeps the input.
        gradient_held: the pipeline keeps the gradient of the output.
    """
    tape = Tape()
    narrow = batch.narrow != batch.element
    g = Graph(tape, batch.element, sums=sums, grouped_sums=experts, waits=waits, narrow=narrow)
    x = g.allocate(batch.shard_bytes)
    tape.cut()
    out = run_layer(g, batch, x, moe=moe)
    if not input_held:
        g.drop(x)
    forward = tape.cut()
    g.drop(out)
    out.grad = tape.take(batch.shard_bytes, WORKING)
    if gradient_held:
        tape.hold(out.grad)
    tape.cut()
    g.run_backward()
    return _record_weights(g, forward)


@cache
def record_embedding(batch: MicroBatch, sums: GradientSum, *, tied: bool, waits: bool) -> RecordedPiece:
    """Return the stretches of the embedding.

    `tied`: the head has computed its gradient of the same table, which is added before earlier gradients.
    """
    tape = Tape()
    g = Graph(tape, batch.element, sums=sums, waits=waits)
    if tied:
        g.tied = tape.take(batch.vocab_rows * batch.model.hidden_size * batch.element, GRADIENTS)
    tape.cut()
    out = _embed(g, batch)
    forward = tape.cut()
    g.drop(out)
    out.grad = tape.take(out.num_bytes, WORKING)
    tape.cut()
    g.run_backward()
    return _record_weights(g, forward)


@cache
def record_head(batch: MicroBatch, sums: GradientSum, *, tied: bool, waits: bool) -> RecordedPiece:
    """Return the stretches of the final norm, the head, and the loss."""
    tape = Tape()
    g = Graph(tape, batch.element, sums="keep" if tied else sums, waits=waits)
    x = g.allocate(batch.shard_bytes)
    tape.cut()
    logits = _run_head(g, batch, x)
    g.drop(x)
    forward = tape.cut()
    mark = g.count_backwards()
    _run_loss(g, batch, logits)
    g.drop(logits)
    loss = tape.cut()
    g.run_backward(mark)
    loss_backward = tape.cut()
    g.run_backward()
    return _record_weights(g, forward)._replace(loss=loss, loss_backward=loss_backward)


def _record_weights(g: Graph, forward: Stretch) -> RecordedPiece:
    backward = g.tape.cut()
    if not g.waits:
        segments = (*g.segments, Segment(backward, 0, grouped=False))
        return RecordedPiece(forward, join(segment.tape for segment in segments), segments=segments)
    g.compute_weights()
    weights = g.tape.cut()
    g.accumulate_weights()
    return RecordedPiece(forward, backward, weights, g.tape.cut())


def _embed(g: Graph, batch: MicroBatch) -> Tensor:
    """Record the lookup of token rows, and of learned positions."""
    model, tape = batch.model, g.tape
    if batch.tp > 1:
        tape.touch(batch.hidden_bytes, WORKING)
        partial = tape.take(batch.hidden_bytes, WORKING)
        shards = tape.take(batch.hidden_bytes if batch.sequence_parallel and batch.sequences > 1 else 0, WORKING)
        rows = g.allocate(batch.shard_bytes)
        if batch.sequence_parallel:
            tape.touch(batch.get_staging_bytes(batch.hidden_bytes), BUFFERS)
        tape.drop(partial, shards)
    else:
        rows = g.allocate(batch.hidden_bytes)
    g.record(lambda: _run_embedding_backward(g, batch, rows))
    if not model.has_learned_positions:
        return rows
    length = batch.tokens // batch.sequences // batch.num_shards
    positions = g.allocate(length * model.hidden_size * batch.element)
    out = g.allocate(rows.num_bytes)
    g.drop(rows, positions)

    def backward() -> None:
        grad = g.take_grad(out)
        if batch.sequences > 1:
            positions.grad = tape.take(positions.num_bytes, WORKING)
        else:
            positions.grad = tape.hold(grad)
        g.add_grad(rows, grad)
        g.look_up(positions, model.max_seq_len * model.hidden_size)
        g.run_backward(g.count_backwards() - 1)

    g.record(backward)
    return out


def _run_embedding_backward(g: Graph, batch: MicroBatch, rows: Tensor) -> None:
    if batch.tp > 1:
        grad = g.take_grad(rows)
        if batch.sequence_parallel:
            gathered = g.tape.take(batch.hidden_bytes, WORKING)
            g.tape.touch(batch.get_staging_bytes(batch.hidden_bytes), BUFFERS)
            if batch.sequences > 1:
                g.tape.touch(batch.hidden_bytes, WORKING)
            g.tape.drop(grad)
            grad = gathered
        rows.grad = g.tape.take(batch.hidden_bytes, WORKING)  # masked: rows of other tp ranks are zero
        g.tape.drop(grad)
    g.look_up(rows, batch.vocab_rows * batch.model.hidden_size)
    g.run_backward(g.count_backwards() - 1)


def _run_head(g: Graph, batch: MicroBatch, x: Tensor) -> Tensor:
    """Record the final norm and the logits."""
    normed = run_norm(g, x)
    entered = gather_input(g, batch, normed)
    if batch.regather:
        entered.whole.recomputed = regather(batch, entered)
        g.keep_until_backward(normed)
    size = batch.tokens * batch.vocab_rows * batch.element
    matmul = Matmul(size, batch.vocab_rows * batch.model.hidden_size, narrow=False, part=LOGITS)
    (logits,) = run_column_parallel(g, batch, entered, [matmul])
    g.drop(normed, entered.whole)
    return _gather_logits(g, batch, logits) if batch.stack.gathers_logits and batch.tp > 1 else logits


def _gather_logits(g: Graph, batch: MicroBatch, shard: Tensor) -> Tensor:
    """Record the gather of all tp ranks' logits, which are copied into one tensor. Drops `shard`."""
    others = g.tape.take(shard.num_bytes * (batch.tp - 1), LOGITS)
    whole = g.allocate(shard.num_bytes * batch.tp, LOGITS)
    g.tape.drop(others)
    g.drop(shard)

    def backward() -> None:
        grad = g.take_grad(whole)
        own = g.tape.take(shard.num_bytes, LOGITS)
        g.tape.drop(grad)
        g.add_grad(shard, own)

    g.record(backward)
    return whole


def _run_loss(g: Graph, batch: MicroBatch, logits: Tensor) -> None:
    """Record cross-entropy in fp32 and its backward, which sets the gradient of `logits`."""
    tape, narrow = g.tape, logits.num_bytes
    if batch.fused_loss:
        _run_fused_loss(g, logits)
        return
    wide = narrow // batch.element * FP32_BYTES
    if batch.stack.in_place_loss and batch.element != FP32_BYTES:
        _run_in_place_loss(g, logits, wide)
        return
    is_mixed, gathers = batch.element != FP32_BYTES, batch.stack.gathers_logits
    fp32 = tape.take(wide, LOGITS) if is_mixed else tape.hold(logits.buffer)
    outputs = g.save(logits) if gathers else []  # the engine keeps its output until the backward has run
    if batch.tp == 1 or gathers:
        softmax = tape.take(wide, LOGITS)
    else:
        shifted = tape.take(wide, LOGITS)
        softmax = tape.take(wide, LOGITS)
        tape.drop(shifted)
    tape.drop(fp32)

    def backward() -> None:
        first = tape.take(wide, LOGITS)
        grad = tape.take(wide, LOGITS)
        tape.drop(first, softmax)
        if is_mixed:
            wide_grad, grad = grad, tape.take(narrow, LOGITS)
            tape.drop(wide_grad)
        logits.grad = grad
        g.release(outputs)

    g.record(backward)


def _run_in_place_loss(g: Graph, logits: Tensor, wide: int) -> None:
    """Record a loss that turns one fp32 copy of the logits into probabilities and gradients, as Megatron-LM's does."""
    tape = g.tape
    fp32 = tape.take(wide, LOGITS)

    def backward() -> None:
        logits.grad = tape.take(logits.num_bytes, LOGITS)
        tape.drop(fp32)

    g.record(backward)


def _run_fused_loss(g: Graph, logits: Tensor) -> None:
    saved = g.save(logits)

    def backward() -> None:
        logits.grad = g.tape.take(logits.num_bytes, LOGITS)
        g.release(saved)

    g.record(backward)
