"""Each part of a chunk walked by itself: an embedding, a layer, a head with its loss.

The ends of a model: the embedding, and the final norm, head and loss.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from planner.cost.memory.autograd import Graph, Segment, Sums, Variable
from planner.cost.memory.layer import Product, columns, enter, layer, norm, regathered
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import BUFFERS, EMPTY, GRADIENTS, LOGITS, WORKING, Buffer, Stretch, Tape, join
from planner.facts.precision import FP32_BYTES


class Piece(NamedTuple):
    """Forward begins with the input there and ends with the output in its place; backward does so with gradients.

    Where weight gradients wait, `made` makes them and `added` adds them up; both are empty otherwise, and then
    backward is made of `segments`.
    """

    forward: Stretch
    backward: Stretch
    made: Stretch = EMPTY
    added: Stretch = EMPTY
    loss: Stretch = EMPTY
    loss_backward: Stretch = EMPTY
    segments: tuple[Segment, ...] = ()


@cache
def layer_piece(
    s: Shape,
    sums: Sums,
    *,
    moe: bool,
    waits: bool,
    experts: Sums | None = None,
    input_held: bool = False,
    gradient_held: bool = False,
) -> Piece:
    """`experts`: what becomes of their gradients if not `sums`. `input_held`, `gradient_held`: who passed them in keeps
    them, whatever happens here."""
    tape = Tape()
    g = Graph(tape, s.element, sums=sums, grouped_sums=experts, waits=waits, narrow=s.narrow != s.element)
    x = g.variable(s.part_bytes)
    tape.cut()
    out = layer(g, s, x, moe=moe)
    if not input_held:
        g.done(x)
    forward = tape.cut()
    g.done(out)
    out.grad = tape.take(s.part_bytes, WORKING)
    if gradient_held:
        tape.hold(out.grad)
    tape.cut()
    g.backward()
    return _finished(g, forward)


@cache
def embedding_piece(s: Shape, sums: Sums, *, tied: bool, waits: bool) -> Piece:
    """`tied`: the head's gradient of the same table has been waiting, and both are added up before they join others."""
    tape = Tape()
    g = Graph(tape, s.element, sums=sums, waits=waits)
    table = s.vocab_rows * s.model.hidden_size
    if tied:
        g.tied = tape.take(table * s.element, GRADIENTS)
    tape.cut()
    out = embed(g, s)
    forward = tape.cut()
    g.done(out)
    out.grad = tape.take(out.num_bytes, WORKING)
    tape.cut()
    g.backward()
    return _finished(g, forward)


@cache
def head_piece(s: Shape, sums: Sums, *, tied: bool, waits: bool) -> Piece:
    tape = Tape()
    g = Graph(tape, s.element, sums="keep" if tied else sums, waits=waits)
    x = g.variable(s.part_bytes)
    tape.cut()
    logits = head(g, s, x)
    g.done(x)
    forward = tape.cut()
    mark = g.mark()
    loss(g, s, logits)
    g.done(logits)
    lost = tape.cut()
    g.backward(mark)
    returned = tape.cut()
    g.backward()
    return _finished(g, forward)._replace(loss=lost, loss_backward=returned)


def _finished(g: Graph, forward: Stretch) -> Piece:
    backward = g.tape.cut()
    if not g.waits:
        segments = (*g.segments, Segment(backward, 0, grouped=False))
        return Piece(forward, join(segment.tape for segment in segments), segments=segments)
    g.make_weights()
    made = g.tape.cut()
    g.add_weights()
    return Piece(forward, backward, made, g.tape.cut())


def embed(g: Graph, s: Shape) -> Variable:
    """Rows of the token table, and of the positions' for gpt."""
    model, tape = s.model, g.tape
    if s.tp > 1:
        tape.touch(s.hidden_bytes, WORKING)
        partial = tape.take(s.hidden_bytes, WORKING)
        parts = tape.take(s.hidden_bytes if s.sequence_parallel and s.sequences > 1 else 0, WORKING)
        rows = g.variable(s.part_bytes)
        if s.sequence_parallel:
            tape.touch(s.staged(s.hidden_bytes), BUFFERS)
        tape.drop(partial, parts)
    else:
        rows = g.variable(s.hidden_bytes)
    g.node(lambda: _embed_backward(g, s, rows))
    if model.arch != "gpt":
        return rows
    length = s.tokens // s.sequences // s.parts
    placed = g.variable(length * model.hidden_size * s.element)
    out = g.variable(rows.num_bytes)
    g.done(rows, placed)

    def run() -> None:
        grad = g.taken(out)
        if s.sequences > 1:
            placed.grad = tape.take(placed.num_bytes, WORKING)
        else:
            placed.grad = tape.hold(grad)
        g.give(rows, grad)
        g.table(placed, model.max_seq_len * model.hidden_size)
        g.backward(g.mark() - 1)

    g.node(run)
    return out


def _embed_backward(g: Graph, s: Shape, rows: Variable) -> None:
    table = s.vocab_rows * s.model.hidden_size
    if s.tp > 1:
        grad = g.taken(rows)
        if s.sequence_parallel:
            gathered = g.tape.take(s.hidden_bytes, WORKING)
            g.tape.touch(s.staged(s.hidden_bytes), BUFFERS)
            if s.sequences > 1:
                g.tape.touch(s.hidden_bytes, WORKING)
            g.tape.drop(grad)
            grad = gathered
        masked = g.tape.take(s.hidden_bytes, WORKING)
        g.tape.drop(grad)
        rows.grad = masked
    g.table(rows, table)
    g.backward(g.mark() - 1)


def head(g: Graph, s: Shape, x: Variable) -> Variable:
    """Final norm, logits and their loss. x is the caller's to let go; what comes out has no size."""
    normed = norm(g, x)
    entered = enter(g, s, normed)
    if s.regather:
        entered.whole.remake = regathered(s, entered)
        g.keep_until_backward(normed)
    size = s.tokens * s.vocab_rows * s.element
    (logits,) = columns(g, s, entered, [Product(size, s.vocab_rows * s.model.hidden_size, narrow=False, part=LOGITS)])
    g.done(normed, entered.whole)
    if s.gathers_logits and s.tp > 1:
        return _concatenated(g, s, logits)
    return logits


def _concatenated(g: Graph, s: Shape, part: Variable) -> Variable:
    """Logits of the whole vocabulary: the other ranks' parts come apart and are copied into one. `part` is let go."""
    others = g.tape.take(part.num_bytes * (s.tp - 1), LOGITS)
    whole = g.variable(part.num_bytes * s.tp, LOGITS)
    g.tape.drop(others)
    g.done(part)

    def run() -> None:
        grad = g.taken(whole)
        own = g.tape.take(part.num_bytes, LOGITS)
        g.tape.drop(grad)
        g.give(part, own)

    g.node(run)
    return whole


def loss(g: Graph, s: Shape, logits: Variable) -> None:
    """Cross-entropy in fp32 and its backward down to the logits' gradient, which `logits` then has."""
    tape, narrow = g.tape, logits.num_bytes
    if s.fused_loss:
        _fused_loss(g, logits)
        return
    wide = narrow // s.element * FP32_BYTES
    mixed = s.element != FP32_BYTES
    cast = tape.take(wide, LOGITS) if mixed else tape.hold(logits.buffer)
    outputs = g.save(logits) if s.gathers_logits else []  # the engine's, until their backward is over
    if s.tp == 1 or s.gathers_logits:
        kept = tape.take(wide, LOGITS)
    else:
        shifted = tape.take(wide, LOGITS)
        kept = tape.take(wide, LOGITS)
        tape.drop(shifted)
    tape.drop(cast)

    def run() -> None:
        first = tape.take(wide, LOGITS)
        made = tape.take(wide, LOGITS)
        tape.drop(first, kept)
        if mixed:
            made = _narrowed(g, made, narrow)
        logits.grad = made
        g.release(outputs)

    g.node(run)


def _fused_loss(g: Graph, logits: Variable) -> None:
    kept = g.save(logits)

    def run() -> None:
        logits.grad = g.tape.take(logits.num_bytes, LOGITS)
        g.release(kept)

    g.node(run)


def _narrowed(g: Graph, made: Buffer, num_bytes: int) -> Buffer:
    narrow = g.tape.take(num_bytes, LOGITS)
    g.tape.drop(made)
    return narrow
