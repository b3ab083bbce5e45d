"""One transformer layer as `workers/trainer/model` computes it, tensor by tensor.

Norms, and the ways into tensor parallelism and out of it.

Attention tensor by tensor: fused, by blocks of a ring, latent, or with every score in memory.

The MLP and the mixture of experts, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from planner.cost.memory.autograd import Graph, Remake, Variable, cast, input_gradient, weight_gradients
from planner.cost.memory.shape import Shape
from planner.cost.memory.tape import ACTIVATIONS, BUFFERS, GRADIENTS, WORKING
from planner.facts.model_shapes import count_expert_rows
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP32_BYTES
from planner.facts.spec import MoeSpec


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
