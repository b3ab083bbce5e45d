"""Attention tensor by tensor: fused, by blocks of a ring, latent, or with every score in memory."""

from __future__ import annotations

from functools import partial

from planner.cost.memory.graph import Graph, Variable
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import BUFFERS, WORKING
from planner.cost.memory.ways import Entered, Product, columns, entered
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP32_BYTES


def attention(g: Graph, s: Shape, x: Entered) -> Variable:
    model = s.model
    if model.mla:
        whole = entered(g, s, x)
        out = _latent_attention(g, s, whole)
        g.done(whole)
        return out
    heads, kv_heads = model.num_heads // s.tp, count_local_kv_heads(model.num_kv_heads, s.tp)
    row = s.tokens * s.element
    query, key = row * heads * model.head_size, row * kv_heads * model.head_size
    h, bias, rope = model.hidden_size, model.arch == "gpt", model.arch == "llama"
    products = (
        Product(query, h * heads * model.head_size, bias=bias, clones=rope and heads > 1),
        Product(key, h * kv_heads * model.head_size, bias=bias, clones=rope and kv_heads > 1),
        Product(key, h * kv_heads * model.head_size, bias=bias),
    )
    q, k, v = made = columns(g, s, x, products)
    if rope:
        q, k = _rotated(g, q), _rotated(g, k)
    mixed = _attend(g, s, q, k, v, heads=heads, out_bytes=query)
    taken = g.copied(mixed) if rope and heads > 1 else mixed
    out = g.linear(taken, s.hidden_bytes, heads * model.head_size * h)
    named = {mixed, taken, q, k, *made}  # until attention is over
    g.done(*named)
    return out


def _rotated(g: Graph, x: Variable) -> Variable:
    """RoPE by halves, backwards too; its cosines and sines are the rank's."""
    return g.op((x,), x.num_bytes)


def _attend(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, *, heads: int, out_bytes: int) -> Variable:
    sums = s.tokens * heads * FP32_BYTES  # each query's log-sum-exp
    if s.cp > 1 or (s.documents and s.attention == "fused"):
        return _attend_by_blocks(g, s, q, k, v, sums, heads=heads, out_bytes=out_bytes)
    if s.attention == "fused":
        return g.op((q, k, v), out_bytes, saves=(q, k, v), extra=sums, saves_output=True)
    return _every_score(g, s, q, k, v, heads=heads, out_bytes=out_bytes)


def _attend_by_blocks(
    g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, sums: int, *, heads: int, out_bytes: int
) -> Variable:
    """One rank's keys and values at a time; output and gradients of queries are joined in fp32."""
    tape, mixed = g.tape, s.element != FP32_BYTES
    wide, wide_q = (size // s.element * FP32_BYTES for size in (out_bytes, q.num_bytes))
    pair = k.num_bytes + v.num_bytes
    block = g.variable(pair)
    others = pair * (0 if s.cp == 1 else 2 if s.ring and s.cp > 2 else 1 if s.ring else s.cp)
    came = tape.take(others, BUFFERS)
    staged = 0 if s.ring or s.cp == 1 else s.staged(others)
    tape.touch(staged, BUFFERS)
    joined = tape.take(wide, WORKING)
    lse = g.save_bytes(sums)
    tape.touch(out_bytes + max(_hidden_bytes(s), wide if mixed else 0), WORKING)
    tape.drop(came)
    out = g.variable(out_bytes) if mixed else Variable(tape.hold(joined))
    tape.drop(joined)
    kept = [*g.save(q, block, out), *lse]
    g.done(block)

    def run() -> None:
        grad = g.taken(out)
        if heads > 1:
            ordered = tape.take(out_bytes, WORKING)
            tape.drop(grad)
            grad = ordered
        total = tape.take(wide_q, WORKING)
        came = tape.take(others, BUFFERS)
        tape.touch(staged, BUFFERS)
        found = tape.take(q.num_bytes + pair, WORKING)
        tape.touch(_hidden_bytes(s), WORKING)
        travelling = tape.take(pair * (1 if s.cp == 1 else 4 if s.ring else 2 * s.cp), BUFFERS)
        # What a reduce-scatter leaves of one's own block comes while all that it sums is there.
        early = None if s.ring or s.cp == 1 else tape.take(pair, WORKING)
        tape.touch(staged, BUFFERS)
        tape.drop(found, travelling, came)
        if mixed:
            made = tape.take(q.num_bytes, WORKING)
            tape.drop(total)
        else:
            made = total
        both = early or tape.take(pair, WORKING)
        tape.drop(grad)
        g.release(kept)
        halves = [tape.take(x.num_bytes, WORKING) for x in (k, v)]
        tape.drop(both)
        g.give(q, made)
        for variable, half in zip((k, v), halves, strict=True):
            g.give(variable, half)

    g.node(run)
    return out


def _hidden_bytes(s: Shape) -> int:
    """What keeps one sequence's queries from keys of other documents: added to the scores, and whether it is."""
    each = s.tokens // s.sequences
    return each * each * (s.element + 1) if s.documents else 0


def _latent_attention(g: Graph, s: Shape, x: Variable) -> Variable:
    """Low-rank queries, keys and values (2405.04434 section 2.1); no trainer of ours runs it yet."""
    mla, heads, h = s.model.mla, s.model.num_heads // s.tp, s.model.hidden_size
    assert mla is not None
    row = s.tokens * s.element
    latent = mla.q_rank + mla.kv_rank + mla.rope_head_dim
    width = heads * (mla.nope_head_dim + mla.rope_head_dim)
    values = heads * mla.value_head_dim
    down = g.linear(x, row * latent, h * latent)
    normed = g.op((down,), row * (mla.q_rank + mla.kv_rank), saves=(down,))
    g.done(down)
    q = g.linear(normed, row * width, mla.q_rank * width)
    k = g.linear(normed, row * width, mla.kv_rank * heads * mla.nope_head_dim)
    v = g.linear(normed, row * values, mla.kv_rank * values)
    g.done(normed)
    mixed = _attend(g, s, q, k, v, heads=heads, out_bytes=row * values)
    g.done(q, k, v)
    out = g.linear(mixed, s.hidden_bytes, values * h)
    g.done(mixed)
    return out


def _every_score(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, *, heads: int, out_bytes: int) -> Variable:
    """Attention with every score in memory; selective recompute keeps queries, keys and values alone."""
    forward = partial(_scores, g, s, heads=heads, out_bytes=out_bytes)
    if s.recompute == "selective" and g.saving:
        return g.recomputed((q, k, v), forward, whole=s.repeats_whole)
    return forward(q, k, v)


def _scores(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, *, heads: int, out_bytes: int) -> Variable:
    """Products, scale, mask, softmax, product: each of the scores' size."""
    each = s.tokens // s.sequences
    size = s.sequences * heads * each * each * s.element
    keys, values = g.op((k,), q.num_bytes), g.op((v,), out_bytes)
    # Where there is dropout, kernels of Megatron's time are planned, which made the mask anew.
    unseen = g.variable(0 if s.dropout else each * each * (s.sequences if s.documents else 1))
    raw = g.op((q, keys), size, saves=(q, keys))
    scaled = g.op((raw,), size)
    g.done(raw)
    masked = g.op((scaled,), size, saves=(unseen,))
    g.done(scaled)
    soft = g.op((masked,), size, saves_output=True)
    g.done(masked)
    if s.dropout:
        dropped = g.op((soft,), size, extra=size // s.element)
        g.done(soft)
        soft = dropped
    out = g.op((soft, values), out_bytes, saves=(soft, values))
    g.done(soft, keys, values, unseen)
    return out
