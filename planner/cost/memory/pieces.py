"""Each part of a chunk walked by itself: an embedding, a layer, a head with its loss."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from planner.cost.memory.ends import embed, head, loss
from planner.cost.memory.graph import Graph, Segment, Sums
from planner.cost.memory.layer import layer
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import EMPTY, GRADIENTS, WORKING, Stretch, Tape, join


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
