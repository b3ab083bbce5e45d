"""The ends of a model: the embedding, and the final norm, head and loss."""

from __future__ import annotations

from planner.cost.memory.graph import Graph, Variable
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import BUFFERS, LOGITS, WORKING, Buffer
from planner.cost.memory.ways import Product, columns, enter, norm, regathered
from planner.facts.precision import FP32_BYTES


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
