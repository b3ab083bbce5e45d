"""One transformer layer as `workers/trainer/model` computes it, tensor by tensor."""

from __future__ import annotations

from planner.cost.memory.attention import attention
from planner.cost.memory.graph import Graph, Remake, Variable
from planner.cost.memory.mlp import mixture, mlp
from planner.cost.memory.shape import Shape
from planner.cost.memory.ways import enter, leave, norm, norm_scratch


def layer(g: Graph, s: Shape, x: Variable, *, moe: bool = False) -> Variable:
    """x is the caller's to let go."""
    if s.recompute == "full" and g.saving:
        return _again(g, s, x, moe=moe)
    return _layer(g, s, x, moe=moe)


def _again(g: Graph, s: Shape, x: Variable, *, moe: bool) -> Variable:
    """Forward keeps the input alone; backward runs it again."""
    g.saving = False
    out = _layer(g, s, x, moe=moe)
    g.saving = True
    kept = g.save(x)

    def run() -> None:
        grad = g.taken(out)
        again = Variable(g.tape.hold(x.buffer))
        mark = g.mark()
        made = _layer(g, s, again, moe=moe)
        g.done(made)
        made.grad = grad
        g.backward(mark)
        g.release([again.buffer, *kept])
        g.give(x, g.taken(again))

    g.node(run)
    return out


def _layer(g: Graph, s: Shape, x: Variable, *, moe: bool) -> Variable:
    bias = s.model.arch == "gpt"
    entered = _enter_half(g, s, x)
    attended = leave(g, s, attention(g, s, entered))
    g.done(entered)
    after = _add_bias(g, s, attended, bias)
    middle = g.add(x, after)
    if bias:
        g.done(after)
    entered = _enter_half(g, s, middle)
    made = leave(g, s, mixture(g, s, entered) if moe else mlp(g, s, entered, s.model.ffn_hidden_size // s.tp))
    g.done(entered)
    after = made if moe else _add_bias(g, s, made, bias)
    out = g.add(middle, after)
    if bias and not moe:
        g.done(after)
    g.done(made, middle, attended)
    return out


def _add_bias(g: Graph, s: Shape, x: Variable, bias: bool) -> Variable:
    kept = g.save_bytes(x.num_bytes // s.element) if s.dropout else []  # its mask
    g.node(lambda: g.release(kept))
    return g.shifted(x) if bias else x


def _enter_half(g: Graph, s: Shape, x: Variable) -> Variable:
    """The norm and the way into tensor parallelism. What comes out is the caller's to let go."""
    normed = norm(g, s, x)
    entered = enter(g, s, normed)
    beside = norm_scratch(s, s.part_bytes)
    if s.light and (s.regather or not s.sequence_parallel):
        entered.remake = Remake(entered.num_bytes, beside)
        g.keep_until_backward(x)  # which it is made of
    elif s.regather and s.recompute != "full":
        entered.remake = Remake(entered.num_bytes, 0)
        g.keep_until_backward(normed)
    g.done(normed)
    return entered
