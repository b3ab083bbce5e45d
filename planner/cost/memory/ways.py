"""Norms, and the ways into tensor parallelism and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.memory.graph import Graph, Variable
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import ACTIVATIONS, BUFFERS, GRADIENTS, WORKING


def norm(g: Graph, x: Variable) -> Variable:
    """Either kind keeps its input."""
    return g.op((x,), x.num_bytes, saves=(x,))


class Entered(NamedTuple):
    """What enters a half of a layer: `part` as the rank has it, and the `whole` that its products take."""

    part: Variable
    whole: Variable


def enter(g: Graph, s: Shape, x: Variable) -> Entered:
    """Into column-parallel products: under sequence parallelism the whole is gathered. It is the caller's to let go, x
    as well."""
    if s.tp > 1 and s.sequence_parallel:
        return Entered(x, _gathered(g, s, s.hidden_bytes, copies=s.sequences > 1))
    return Entered(x, Variable(g.tape.hold(x.buffer)))


def entered(g: Graph, s: Shape, x: Entered) -> Variable:
    """The whole as a tensor of its own, whose gradient backward sums over tp."""
    tape = g.tape
    out = Variable(tape.hold(x.whole.buffer))
    out.remake = x.whole.remake

    def run() -> None:
        grad = g.taken(out)
        if s.tp > 1:
            summed = tape.take(x.part.num_bytes, WORKING)
            tape.drop(grad)
            grad = summed
        g.give(x.part, grad)

    def run_divided() -> None:
        grad = g.taken(out)
        parts = tape.take(s.hidden_bytes, BUFFERS) if s.sequences > 1 else None
        summed = tape.take(x.part.num_bytes, WORKING)
        tape.drop(grad, *([parts] if parts else []))
        g.give(x.part, summed)

    g.node(run_divided if s.tp > 1 and s.sequence_parallel else run)
    return out


class Product(NamedTuple):
    """With a weight of so many elements; `num_bytes` come out. `clones`: its gradient arrives in another order."""

    num_bytes: int
    weight: int
    bias: bool = False
    clones: bool = False
    part: int = ACTIVATIONS


def columns(g: Graph, s: Shape, x: Entered, products: Sequence[Product]) -> list[Variable]:
    """Column-parallel products of what entered; over several ranks one operation, whose backward sums the input's
    gradient while it makes the weights', unless these wait."""
    if s.tp == 1 or g.waits:
        whole = entered(g, s, x)
        outs = [g.linear(whole, p.num_bytes, p.weight, bias=p.bias, clones=p.clones, part=p.part) for p in products]
        g.done(whole)
        return outs
    tape, kept = g.tape, g.save(x.whole)
    outs = [g.variable(p.num_bytes, p.part) for p in products]

    def run() -> None:
        grads = [g.taken(out) for out in outs]
        g.unpack(kept)
        rows = [tape.take(p.num_bytes, WORKING) for p in products if p.clones]
        whole = tape.take(s.hidden_bytes, WORKING)
        if s.sequence_parallel:
            parts = [tape.take(s.hidden_bytes, BUFFERS)] if s.sequences > 1 else []
            summed = tape.take(x.part.num_bytes, WORKING)
        else:
            parts, summed = [], tape.hold(whole)
        weights = [tape.take(p.weight * g.element, GRADIENTS) for p in products]
        tape.drop(*grads, *rows, whole, *parts)
        g.release(kept)
        for made, product in zip(weights, products, strict=True):
            g.accumulate(made, product.weight)
        g.give(x.part, summed)

    g.node(run)
    return outs


def _gathered(g: Graph, s: Shape, whole: int, *, copies: bool) -> Variable:
    """Parts of several sequences do not lie as the whole does: they are copied."""
    parts = g.variable(whole)
    if not copies:
        return parts
    out = g.variable(whole)
    g.done(parts)
    return out


def leave(g: Graph, s: Shape, x: Variable) -> Variable:
    """Sums of a row-parallel product; x is let go."""
    if s.tp == 1:
        return x
    tape, whole = g.tape, s.hidden_bytes
    copies = s.sequences > 1
    if s.sequence_parallel and copies:
        tape.briefly(whole, BUFFERS)
    out = g.variable(x.num_bytes // s.parts)
    g.done(x)

    def run() -> None:
        grad = g.taken(out)
        if s.sequence_parallel:
            made = _gathered(g, s, whole, copies=copies).buffer
            tape.drop(grad)
            grad = made
        g.give(x, grad)

    g.node(run)
    return out
