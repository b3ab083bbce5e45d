"""One transformer layer as `workers/trainer/model` computes it, tensor by tensor."""

from __future__ import annotations

from planner.cost.memory.attention import attention
from planner.cost.memory.graph import Graph, Remake, Variable
from planner.cost.memory.mlp import mixture, mlp
from planner.cost.memory.shape import Shape
from planner.cost.memory.ways import enter, leave, norm, norm_scratch
from planner.facts.precision import FP32_BYTES
from planner.facts.tensors.placements import kv_heads_held


def layer(g: Graph, s: Shape, x: Variable, *, moe: bool = False) -> Variable:
    """x is the caller's to let go."""
    if s.recompute == "full" and g.saving:
        return _again(g, s, x, 0, moe=moe)
    if s.by_operation and g.saving:
        return _again(g, s, x, kept_outputs(s, moe=moe), moe=moe)
    return _layer(g, s, x, moe=moe)


def kept_outputs(s: Shape, *, moe: bool) -> int:
    """Bytes that op-level selective recompute keeps of a layer beside its input: the outputs of every second product
    and of attention, and with sequence parallelism what is scattered (torchtitan, parallelize_llama.py)."""
    model, row = s.model, s.tokens * s.element
    heads, kv_heads = model.num_heads // s.tp, kv_heads_held(model.num_kv_heads, s.tp)
    if mla := model.mla:
        attended = heads * mla.value_head_dim
        products = [mla.q_rank, mla.kv_rank + mla.rope_head_dim, model.hidden_size]
    else:
        attended, query, key = heads * model.head_dim, heads * model.head_dim, kv_heads * model.head_dim
        products = [query + 2 * key] if model.arch == "gpt" else [query, key]
    inner = model.ffn_hidden_size // s.tp
    if moe and model.moe:
        products.append(model.moe.num_experts)
    else:
        products += [inner] if model.arch == "gpt" else [inner, model.hidden_size]
    scattered = 2 * s.part_bytes if s.sequence_parallel else 0
    return row * (sum(products) + attended) + s.tokens * heads * FP32_BYTES + scattered


def _again(g: Graph, s: Shape, x: Variable, kept_bytes: int, *, moe: bool) -> Variable:
    """Forward keeps the input and so many bytes of what is between; backward runs it again and finds these made."""
    g.saving = False
    out = _layer(g, s, x, moe=moe)
    g.saving = True
    kept, outputs = g.save(x), g.save_bytes(kept_bytes)

    def run() -> None:
        grad = g.taken(out)
        g.release(outputs)  # they are among what is made
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
