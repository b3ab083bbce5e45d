"""One transformer layer as `workers/trainer/model` computes it, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from planner.cost.memory.attention import attention
from planner.cost.memory.graph import Graph, Variable
from planner.cost.memory.mlp import mixture, mlp
from planner.cost.memory.shape import Shape
from planner.cost.memory.ways import Entered, enter, leave, norm, regathered
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP32_BYTES


def layer(g: Graph, s: Shape, x: Variable, *, moe: bool = False) -> Variable:
    """x is the caller's to let go."""
    forward = partial(_layer, g, s, moe=moe)
    if g.saving and (s.recompute == "full" or s.by_operation):
        kept_bytes = kept_outputs(s, moe=moe) if s.by_operation else 0
        return g.recomputed((x,), forward, kept_bytes=kept_bytes, whole=s.repeats_whole)
    return forward(x)


def kept_outputs(s: Shape, *, moe: bool) -> int:
    """Bytes that op-level selective recompute keeps of a layer beside its input: the outputs of every second product
    and of attention, and with sequence parallelism what is scattered (torchtitan, parallelize_llama.py)."""
    model, row = s.model, s.tokens * s.element
    heads, kv_heads = model.num_heads // s.tp, count_local_kv_heads(model.num_kv_heads, s.tp)
    if mla := model.mla:
        attended = heads * mla.value_head_dim
        products = [mla.q_rank, mla.kv_rank + mla.rope_head_dim, model.hidden_size]
    else:
        attended, query, key = heads * model.head_size, heads * model.head_size, kv_heads * model.head_size
        products = [query + 2 * key] if model.arch == "gpt" else [query, key]
    inner = model.ffn_hidden_size // s.tp
    if moe and model.moe:
        products.append(model.moe.num_experts)
    else:
        products += [inner] if model.arch == "gpt" else [inner, model.hidden_size]
    scattered = 2 * s.part_bytes if s.sequence_parallel else 0
    return row * (sum(products) + attended) + s.tokens * heads * FP32_BYTES + scattered


def _layer(g: Graph, s: Shape, x: Variable, *, moe: bool) -> Variable:
    bias = s.model.arch == "gpt"
    attended = _half(g, s, x, attention)
    after = _add_bias(g, s, attended, bias)
    middle = g.add(x, after)
    if bias:
        g.done(after)
    made = _half(g, s, middle, mixture if moe else _dense)
    after = made if moe else _add_bias(g, s, made, bias)
    out = g.add(middle, after)
    if bias and not moe:
        g.done(after)
    g.done(made, middle, attended)
    return out


def _dense(g: Graph, s: Shape, x: Entered) -> Variable:
    return mlp(g, s, x, s.model.ffn_hidden_size // s.tp)


def _add_bias(g: Graph, s: Shape, x: Variable, bias: bool) -> Variable:
    kept = g.save_bytes(x.num_bytes // s.element) if s.dropout else []  # its mask
    g.node(lambda: g.release(kept))
    return g.shifted(x) if bias else x


def _half(g: Graph, s: Shape, x: Variable, inside: Callable[[Graph, Shape, Entered], Variable]) -> Variable:
    """The norm, the way into tensor parallelism, what is `inside`, and the way out."""
    normed = norm(g, x)
    entered = enter(g, s, normed)
    whole = entered.whole
    if s.light and (s.regather or not s.sequence_parallel):
        whole.remake = regathered(s, entered, made=normed.num_bytes)
        g.keep_until_backward(x)  # which it is made of
    elif s.regather and s.recompute != "full":
        whole.remake = regathered(s, entered)
        g.keep_until_backward(normed)
    out = leave(g, s, inside(g, s, entered))
    g.done(normed, whole)
    return out
