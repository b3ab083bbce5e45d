"""Norms, and the ways into tensor parallelism and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.memory.fp8 import cast, input_gradient, weight_gradients
from planner.cost.memory.graph import Graph, Remake, Variable
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


def regathered(s: Shape, x: Entered, *, made: int = 0) -> Remake:
    """The whole as backward makes it again, of a part that was kept or, of so many bytes, `made` again too."""
    if s.tp == 1 or not s.sequence_parallel:
        return Remake(x.whole.num_bytes, 0)
    parts = x.whole.num_bytes if s.sequences > 1 else s.staged(x.whole.num_bytes)
    return Remake(x.whole.num_bytes, made + parts)


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
        tape.touch(s.staged(s.hidden_bytes), BUFFERS)
        tape.drop(grad, *([parts] if parts else []))
        g.give(x.part, summed)

    g.node(run_divided if s.tp > 1 and s.sequence_parallel else run)
    return out


class Product(NamedTuple):
    """With a weight of so many elements; `num_bytes` come out. `clones`: its gradient arrives in another order. Only a
    `narrow` one may run in fp8."""

    num_bytes: int
    weight: int
    bias: bool = False
    clones: bool = False
    narrow: bool = True
    part: int = ACTIVATIONS


def columns(g: Graph, s: Shape, x: Entered, products: Sequence[Product]) -> list[Variable]:
    """Column-parallel products of what entered; over several ranks one operation, whose backward sums the input's
    gradient while it makes the weights', unless these wait."""
    narrow = g.narrow and all(p.narrow for p in products)
    if g.waits or (s.tp == 1 and not narrow):
        whole = entered(g, s, x)
        outs = [
            g.linear(whole, p.num_bytes, p.weight, bias=p.bias, clones=p.clones, narrow=narrow, part=p.part)
            for p in products
        ]
        g.done(whole)
        return outs
    tape, kept, numel = g.tape, g.save(x.whole), s.hidden_bytes // g.element
    outs, sizes = [], [p.weight for p in products]
    taken = [cast(tape, numel, g.element)] if narrow else []
    for product in products:
        operand = [cast(tape, product.weight, g.element)] if narrow else []
        outs.append(g.variable(product.num_bytes, product.part))
        tape.drop(*operand)
    tape.drop(*taken)

    def run() -> None:
        grads = [g.taken(out) for out in outs]
        g.unpack(kept)
        rows = [tape.take(p.num_bytes, WORKING) for p in products if p.clones]
        casts = [cast(tape, p.num_bytes // g.element, g.element) for p in products] if narrow else []
        whole = input_gradient(tape, s.hidden_bytes, g.element, sizes) if narrow else tape.take(s.hidden_bytes, WORKING)
        if s.tp > 1 and s.sequence_parallel:
            sent = [tape.take(s.hidden_bytes, BUFFERS) if s.sequences > 1 else tape.hold(whole)]
            summed = tape.take(x.part.num_bytes, WORKING)
            sent.append(tape.take(s.staged(s.hidden_bytes), BUFFERS))
            tape.drop(whole)
        else:
            sent, summed = [whole], tape.hold(whole)
        if narrow:
            weights = weight_gradients(tape, numel, g.element, casts, sizes)
        else:
            weights = [tape.take(weight * g.element, GRADIENTS) for weight in sizes]
        tape.drop(*grads, *rows, *casts, *sent)
        g.release(kept)
        for made, product in zip(weights, products, strict=True):
            g.accumulate(made, product.weight)
        g.give(x.part, summed)

    g.node(run)
    return outs


def _gathered(g: Graph, s: Shape, whole: int, *, copies: bool) -> Variable:
    """Parts of several sequences do not lie as the whole does: they are copied."""
    parts = g.variable(whole)
    g.tape.touch(s.staged(whole), BUFFERS)
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
    parts = tape.take(whole if s.sequence_parallel and copies else 0, BUFFERS)
    out = g.variable(x.num_bytes // s.parts)
    if s.sequence_parallel:
        tape.touch(s.staged(whole), BUFFERS)
    tape.drop(parts)
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
