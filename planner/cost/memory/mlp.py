"""The MLP and the mixture of experts, tensor by tensor."""

from __future__ import annotations

from planner.cost.memory.graph import Graph, Remake, Variable
from planner.cost.memory.shape import Shape
from planner.cost.memory.ways import Entered, Product, columns, entered
from planner.facts.model_shapes import count_expert_rows
from planner.facts.precision import FP32_BYTES
from planner.facts.spec import MoeSpec


def mixture(g: Graph, s: Shape, entering: Entered) -> Variable:
    """Router, the experts' answers, their weighted sum, shared experts. What has a name stays until all is over."""
    moe, h = s.model.moe, s.model.hidden_size
    assert moe is not None
    x = entered(g, s, entering)
    routed = s.tokens * moe.experts_per_token
    wide = g.op((x,), s.tokens * h * FP32_BYTES) if s.element != FP32_BYTES else g.passes(x)
    if s.element == FP32_BYTES:
        wide.remake = x.remake  # a view of what is gathered again
    scores = g.linear(wide, s.tokens * moe.num_experts * FP32_BYTES, moe.num_experts * h, narrow=False)
    probabilities = g.op((scores,), scores.num_bytes, saves_output=True)
    g.done(wide, scores)
    answers, named = _answered(g, s, x, moe)
    gates = g.op((probabilities,), routed * s.element)
    weighed = g.op((answers, gates), routed * h * s.element, saves=(answers, gates))
    out = g.op((weighed,), s.hidden_bytes)
    g.done(weighed, answers, probabilities, gates, *named)
    if moe.shared_experts:
        shared = _down(g, s, *_apart(g, s, x, moe.shared_experts * moe.expert_ffn_hidden_size // s.tp))
        alone, out = out, g.add(out, shared)
        g.done(alone, shared)
    if moe.balance_loss:  # saves what it is made of, last of all
        g.save()
        g.node(lambda: None)
    g.done(x)
    return out


def _answered(g: Graph, s: Shape, x: Variable, moe: MoeSpec) -> tuple[Variable, tuple[Variable, ...]]:
    """Rows to the experts' ranks, a product for each expert, rows back; and what else has a name by then."""
    h = s.model.hidden_size
    row, inner, routed = h * s.element, moe.expert_ffn_hidden_size // s.tp, s.tokens * moe.experts_per_token
    weight = moe.num_experts // s.ep * inner * h
    drops = moe.capacity_factor is not None
    taken = count_expert_rows(moe, s.tokens, s.seq_len)
    sent, named = _sent(g, x, routed * row, taken * row, drops=drops)
    arrived = _exchanged(g, s, sent)
    if not drops:
        g.done(sent)
    # By expert, where they came by rank: buffers of one size for a single expert lie so already.
    turned = s.ep > 1 and (not drops or moe.num_experts > s.ep)
    rows = _copied_if(g, arrived, turned)
    gate, up = (g.linear(rows, taken * inner * s.element, weight, grouped=True) for _ in range(2))
    made = activated(g, s, gate, up, dropped=False)
    g.done(gate, up)
    outputs = g.linear(made, taken * row, weight, grouped=True)
    g.done(made, rows)
    ordered = _copied_if(g, outputs, turned)
    back = _exchanged(g, s, ordered)
    if drops:
        filled = g.copied(back)  # and a row of zeros, which dropped tokens take
        g.done(back)
        return g.op((filled,), routed * row), (*named, sent, arrived, outputs, ordered, filled)
    g.done(outputs)
    answers = g.op((back,), routed * row)
    g.done(back)
    return answers, (arrived, ordered)


def _sent(
    g: Graph, x: Variable, routed_bytes: int, taken_bytes: int, *, drops: bool
) -> tuple[Variable, tuple[Variable, ...]]:
    """Rows of tokens as they leave for their experts, and what their sender holds beside them. Where tokens are dropped
    they are added into buffers of one size, and torch's `index_add` keeps what it added (2.13)."""
    if not drops:
        return g.op((x,), routed_bytes), ()
    repeated = g.op((x,), routed_bytes)
    zeros = g.variable(taken_bytes)
    sent = g.op((repeated,), taken_bytes, saves=(repeated,))
    g.done(zeros)
    return sent, (repeated,)


def _exchanged(g: Graph, s: Shape, rows: Variable) -> Variable:
    return _copied_if(g, rows, s.ep > 1)


def _copied_if(g: Graph, rows: Variable, another: bool) -> Variable:
    return g.op((rows,), rows.num_bytes) if another else g.passes(rows)


def mlp(g: Graph, s: Shape, x: Entered, inner: int) -> Variable:
    """GELU for gpt; SwiGLU else."""
    bias = s.model.arch == "gpt"
    product = Product(s.tokens * inner * s.element, s.model.hidden_size * inner, bias=bias)
    up, *gates = columns(g, s, x, [product] if bias else [product, product])
    return _down(g, s, gates[0] if gates else None, up)


def _apart(g: Graph, s: Shape, x: Variable, inner: int) -> tuple[Variable | None, Variable]:
    """Gate and up of an input that has entered with others'."""
    wide, weight, bias = s.tokens * inner * s.element, s.model.hidden_size * inner, s.model.arch == "gpt"
    gate = None if bias else g.linear(x, wide, weight)
    return gate, g.linear(x, wide, weight, bias=bias)


def _down(g: Graph, s: Shape, gate: Variable | None, up: Variable) -> Variable:
    """`gate` and `up` are let go at its end."""
    made = activated(g, s, gate, up, dropped=s.light)
    out = g.linear(made, s.hidden_bytes, up.num_bytes // (s.tokens * s.element) * s.model.hidden_size)
    g.done(*([gate] if gate else []), up, made)
    return out


def activated(g: Graph, s: Shape, gate: Variable | None, up: Variable, *, dropped: bool) -> Variable:
    """`dropped`: backward makes it again."""
    wide = up.num_bytes
    if gate is None or not s.keeps_opened:
        inputs = (up,) if gate is None else (gate, up)
        made, beside = g.op(inputs, wide, saves=inputs), 0
    else:
        opened = g.op((gate,), wide, saves=(gate,))
        if dropped:
            opened.remake = Remake(wide, 0)
        made, beside = g.op((opened, up), wide, saves=(opened, up)), wide
        g.done(opened)
    if dropped:
        made.remake = Remake(wide, beside)
    return made
