"""Norms, and the ways into tensor parallelism and out of it."""

from __future__ import annotations

from planner.cost.memory.graph import Graph, Variable
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import BUFFERS, WORKING
from planner.facts.precision import FP32_BYTES


def norm_scratch(s: Shape, num_bytes: int) -> int:
    """What a norm needs for a moment beside its output."""
    return 3 * num_bytes // s.element * FP32_BYTES if _by_operations(s) else 0


def _by_operations(s: Shape) -> bool:
    """torch's RMSNorm on a CPU is no one kernel (2.13): it keeps its input and the normalised values in fp32."""
    return s.model.arch == "llama" and s.device == "cpu"


def norm(g: Graph, s: Shape, x: Variable) -> Variable:
    """LayerNorm and a GPU's RMSNorm keep their input."""
    if not _by_operations(s):
        return g.op((x,), x.num_bytes, saves=(x,))
    wide = x.num_bytes // s.element * FP32_BYTES
    mixed = s.element != FP32_BYTES
    tape = g.tape
    cast = g.variable(wide) if mixed else Variable(tape.hold(x.buffer))
    tape.briefly(wide, WORKING)
    normal = g.variable(wide)
    if mixed:
        tape.briefly(wide, WORKING)
    out = g.variable(x.num_bytes)
    kept, kept_normal = g.save(cast), g.save(normal)
    g.done(cast, normal)

    def run() -> None:
        grad = g.taken(out)
        if mixed:
            wider = tape.take(wide, WORKING)
            tape.drop(grad)
            grad = wider
        tape.briefly(2 * wide, WORKING)
        through = tape.take(wide, WORKING)
        tape.drop(grad)
        tape.briefly(wide, WORKING)
        g.release(kept_normal)
        slope = [tape.take(wide, WORKING) for _ in range(4)]
        tape.drop(*slope[:3])
        g.release(kept)
        made = tape.take(wide, WORKING)
        tape.drop(slope[3], through)
        if mixed:
            narrow = tape.take(x.num_bytes, WORKING)
            tape.drop(made)
            made = narrow
        g.give(x, made)

    g.node(run)
    return out


def enter(g: Graph, s: Shape, x: Variable) -> Variable:
    """Into column-parallel products: the whole sequence, and backward the sum over tp of the input's gradient."""
    if s.tp == 1:
        return g.passes(x)
    tape, whole = g.tape, s.hidden_bytes
    copies = s.sequences > 1
    shared = not s.sequence_parallel
    out = Variable(tape.hold(x.buffer)) if shared else _gathered(g, s, whole, copies=copies)

    def run() -> None:
        grad = g.taken(out)
        if not s.sequence_parallel:
            summed = tape.take(whole, WORKING)
            tape.drop(grad)
        else:
            parts = tape.take(whole, BUFFERS) if copies else None
            summed = tape.take(x.num_bytes, WORKING)
            tape.drop(grad, *([parts] if parts else []))
        g.give(x, summed)

    g.node(run)
    return out


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
