"""One transformer layer as `workers/trainer/model` computes it, tensor by tensor."""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.memory.graph import Graph, Remake, Variable
from planner.cost.memory.tape import BUFFERS, WORKING
from planner.facts.placements import kv_heads_held, vocab_rows
from planner.facts.precision import FP8_BYTES, FP32_BYTES, mix_of
from planner.facts.shards import micro_batch_tokens
from planner.facts.spec import AttentionKernel, Device, JobSpec, ModelSpec, Recompute, StackName

# llm-foundry's loss is flash-attn's kernel.
FUSED_LOSS: tuple[StackName, ...] = ("fsdp1",)


class Shape(NamedTuple):
    """What one rank computes of a layer with one micro-batch. `tokens` of its cp part, `element` bytes of the compute
    type, `narrow` of what products take; `parts` that sequence parallelism divides the residual stream into.
    `fused_loss`: one kernel reads the logits and writes their gradient."""

    model: ModelSpec
    vocab_rows: int
    tokens: int
    sequences: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    cp: int
    ring: bool
    ep: int
    element: int
    recompute: Recompute
    regather: bool
    attention: AttentionKernel
    dropout: bool
    device: Device
    narrow: int
    fused_loss: bool

    @property
    def parts(self) -> int:
        return self.tp if self.sequence_parallel else 1

    @property
    def hidden_bytes(self) -> int:
        """Hidden states between collectives."""
        return self.tokens * self.model.hidden_size * self.element

    @property
    def part_bytes(self) -> int:
        """Hidden states of the residual stream."""
        return self.hidden_bytes // self.parts

    @property
    def embedded_elements(self) -> int:
        """Of the tables that an embedding looks up."""
        model = self.model
        positions = model.max_seq_len if model.arch == "gpt" else 0
        return (self.vocab_rows + positions) * model.hidden_size

    @property
    def light(self) -> bool:
        """Selective recompute where attention is fused: norms and activations are made again."""
        return self.recompute == "selective" and self.attention == "fused"


def shape_of(spec: JobSpec) -> Shape:
    layout, train = spec.layout, spec.train
    return Shape(
        model=spec.model,
        vocab_rows=vocab_rows(spec),
        tokens=micro_batch_tokens(spec),
        sequences=spec.micro_batch_size,
        seq_len=train.seq_len,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        ring=layout.cp_method == "ring",
        ep=layout.ep,
        element=mix_of(train.precision).compute,
        recompute=layout.recompute,
        regather=layout.regather,
        attention=train.attention,
        dropout=train.dropout,
        device=spec.resources.device,
        narrow=FP8_BYTES if mix_of(train.precision).gemm == "fp8" else mix_of(train.precision).compute,
        fused_loss=spec.resources.stack in FUSED_LOSS,
    )


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
    attended = _leave(g, s, _attention(g, s, entered))
    g.done(entered)
    after = _add_bias(g, s, attended, bias)
    middle = g.add(x, after)
    if bias:
        g.done(after)
    entered = _enter_half(g, s, middle)
    made = _leave(g, s, _mixture(g, s, entered) if moe else _mlp(g, s, entered, s.model.ffn_hidden_size // s.tp))
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


def _leave(g: Graph, s: Shape, x: Variable) -> Variable:
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


def _attention(g: Graph, s: Shape, x: Variable) -> Variable:
    model = s.model
    if model.mla:
        return _latent_attention(g, s, x)
    heads, kv_heads = model.num_heads // s.tp, kv_heads_held(model.num_kv_heads, s.tp)
    row = s.tokens * s.element
    query, key = row * heads * model.head_dim, row * kv_heads * model.head_dim
    h, bias, rope = model.hidden_size, model.arch == "gpt", model.arch == "llama"
    kv_clones = rope and kv_heads > 1
    q = g.linear(x, query, h * heads * model.head_dim, bias=bias, clones=rope and heads > 1)
    k = g.linear(x, key, h * kv_heads * model.head_dim, bias=bias, clones=kv_clones)
    v = g.linear(x, key, h * kv_heads * model.head_dim, bias=bias)
    if rope:
        rotated = _rotated(g, s, q)
        other = _rotated(g, s, k)
        g.done(q, k)
        q, k = rotated, other
    mixed = _attend(g, s, q, k, v, heads=heads, kv_heads=kv_heads)
    g.done(q, k, v)
    if rope and heads > 1:
        ordered = g.copied(mixed)
        g.done(mixed)
        mixed = ordered
    out = g.linear(mixed, s.hidden_bytes, heads * model.head_dim * h)
    g.done(mixed)
    return out


def _rotated(g: Graph, s: Shape, x: Variable) -> Variable:
    """RoPE by halves: tables of cosines and sines are kept, a few operations come and go."""
    tape, whole = g.tape, x.num_bytes
    table = s.tokens // s.sequences * s.model.head_dim * s.element
    kept = g.save_bytes(table)
    tape.briefly(whole, WORKING)
    out = g.variable(whole)

    def run() -> None:
        grad = g.taken(out)
        tape.briefly(whole * 3 // 2, WORKING)
        halves = tape.take(whole, WORKING)
        tape.drop(grad)
        g.release(kept)
        wide = tape.take(2 * whole, WORKING)
        tape.drop(halves)
        made = tape.take(whole, WORKING)
        tape.drop(wide)
        g.give(x, made)

    g.node(run)
    return out


def _attend(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, *, heads: int, kv_heads: int) -> Variable:
    sums = s.tokens * heads * FP32_BYTES  # each query's log-sum-exp
    if s.cp > 1:
        return _attend_by_blocks(g, s, q, k, v, sums)
    if s.attention == "fused":
        return g.op((q, k, v), q.num_bytes, saves=(q, k, v), extra=sums, saves_output=True)
    return _every_score(g, s, q, k, v, heads=heads, kv_heads=kv_heads)


def _attend_by_blocks(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, sums: int) -> Variable:
    """One rank's keys and values at a time; output and gradients of queries are joined in fp32."""
    tape, wide, mixed = g.tape, q.num_bytes // s.element * FP32_BYTES, s.element != FP32_BYTES
    pair = k.num_bytes + v.num_bytes
    block = g.variable(pair)
    others = pair * (2 if s.ring and s.cp > 2 else 1 if s.ring else s.cp)
    came = tape.take(others, BUFFERS)
    joined = tape.take(wide, WORKING)
    lse = g.save_bytes(sums)
    tape.briefly(q.num_bytes + (wide if mixed else 0), WORKING)
    tape.drop(came)
    out = g.variable(q.num_bytes) if mixed else Variable(tape.hold(joined))
    tape.drop(joined)
    kept = [*g.save(q, block, out), *lse]
    g.done(block)

    def run() -> None:
        grad = g.taken(out)
        if q.num_bytes != s.tokens * s.model.head_dim * s.element:
            ordered = tape.take(q.num_bytes, WORKING)
            tape.drop(grad)
            grad = ordered
        total = tape.take(wide, WORKING)
        came = tape.take(others, BUFFERS)
        found = tape.take(q.num_bytes + pair, WORKING)
        travelling = tape.take(pair * (4 if s.ring else 2 * s.cp), BUFFERS)
        tape.drop(found, travelling, came)
        if mixed:
            made = tape.take(q.num_bytes, WORKING)
            tape.drop(total)
        else:
            made = total
        both = tape.take(pair, WORKING)
        tape.drop(grad)
        g.release(kept)
        halves = [tape.take(x.num_bytes, WORKING) for x in (k, v)]
        tape.drop(both)
        g.give(q, made)
        for variable, half in zip((k, v), halves, strict=True):
            g.give(variable, half)

    g.node(run)
    return out


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
    sums = s.tokens * heads * FP32_BYTES
    mixed = g.op((q, k, v), row * values, saves=(q, k, v), extra=sums, saves_output=True)
    g.done(q, k, v)
    out = g.linear(mixed, s.hidden_bytes, values * h)
    g.done(mixed)
    return out


def _mixture(g: Graph, s: Shape, x: Variable) -> Variable:
    """Router, rows to the experts' ranks, a product for each expert, rows back, weighted sum."""
    moe, h = s.model.moe, s.model.hidden_size
    assert moe is not None
    routed = s.tokens * moe.experts_per_token
    row = h * s.element
    inner = moe.expert_ffn_hidden_size // s.tp
    weight = moe.num_experts // s.ep * inner * h
    wide = g.op((x,), s.tokens * h * FP32_BYTES) if s.element != FP32_BYTES else g.passes(x)
    probabilities = g.op((wide,), s.tokens * moe.num_experts * FP32_BYTES, saves=(wide,), saves_output=True)
    g.done(wide)
    sent = g.op((x,), routed * row)
    arrived = _exchanged(g, s, sent)
    g.done(sent)
    rows = _exchanged(g, s, arrived)  # by expert, where they came by rank
    g.done(arrived)
    inside = routed * inner * s.element
    gate, up = (g.linear(rows, inside, weight) for _ in range(2))
    made = activated(g, s, gate, up, dropped=False)
    outputs = g.linear(made, routed * row, weight)
    g.done(gate, up, made)
    ordered = _exchanged(g, s, outputs)
    back = _exchanged(g, s, ordered)
    g.done(outputs, ordered)
    answers = g.op((back,), routed * row)
    g.done(back, rows)
    gates = g.op((probabilities,), routed * s.element)
    weighed = g.op((answers, gates), routed * row, saves=(answers, gates))
    out = g.op((weighed,), s.hidden_bytes)
    g.done(weighed, answers, probabilities, gates)
    if not moe.shared_experts:
        return out
    shared = _mlp(g, s, x, moe.shared_experts * moe.expert_ffn_hidden_size // s.tp)
    both = g.add(out, shared)
    g.done(out, shared)
    return both


def _exchanged(g: Graph, s: Shape, rows: Variable) -> Variable:
    return g.op((rows,), rows.num_bytes) if s.ep > 1 else g.passes(rows)


def _mlp(g: Graph, s: Shape, x: Variable, inner: int) -> Variable:
    """GELU for gpt; SwiGLU else."""
    h, wide = s.model.hidden_size, s.tokens * inner * s.element
    bias = s.model.arch == "gpt"
    gate = None if bias else g.linear(x, wide, h * inner)
    up = g.linear(x, wide, h * inner, bias=bias)
    made = activated(g, s, gate, up, dropped=s.light)
    g.done(*([gate] if gate else []), up)
    out = g.linear(made, s.hidden_bytes, inner * h)
    g.done(made)
    return out


def activated(g: Graph, s: Shape, gate: Variable | None, up: Variable, *, dropped: bool) -> Variable:
    """`dropped`: backward makes it again."""
    wide = up.num_bytes
    if gate is None:
        made = g.op((up,), wide, saves=(up,))
        if dropped:
            made.remake = Remake(wide, 0)
        return made
    opened = g.op((gate,), wide, saves=(gate,))
    if dropped:
        opened.remake = Remake(wide, 0)
    made = g.op((opened, up), wide, saves=(opened, up))
    if dropped:
        made.remake = Remake(wide, wide)
    g.done(opened)
    return made


def _every_score(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, *, heads: int, kv_heads: int) -> Variable:
    """Attention with every score in memory; selective recompute keeps queries, keys and values alone."""
    if s.recompute != "selective" or not g.saving:
        return _scores(g, s, q, k, v, heads=heads)
    g.saving = False
    out = _scores(g, s, q, k, v, heads=heads)
    g.saving = True
    kept = g.save(q, k, v)

    def run() -> None:
        grad = g.taken(out)
        again = [Variable(g.tape.hold(x.buffer)) for x in (q, k, v)]
        mark = g.mark()
        made = _scores(g, s, *again, heads=heads)
        g.done(made)
        made.grad = grad
        g.backward(mark)
        g.release([*(x.buffer for x in again), *kept])
        for variable, copy in zip((q, k, v), again, strict=True):
            g.give(variable, g.taken(copy))

    g.node(run)
    return out


def _scores(g: Graph, s: Shape, q: Variable, k: Variable, v: Variable, *, heads: int) -> Variable:
    """Products, scale, mask, softmax, product: each of the scores' size."""
    each = s.tokens // s.sequences
    size = s.sequences * heads * each * each * s.element
    keys, values = (g.op((x,), q.num_bytes) for x in (k, v))
    raw = g.op((q, keys), size, saves=(q, keys))
    scaled = g.op((raw,), size)
    g.done(raw)
    # Where there is dropout, kernels of Megatron's time are planned, which made the mask anew.
    masked = g.op((scaled,), size, extra=0 if s.dropout else each * each)
    g.done(scaled)
    soft = g.op((masked,), size, saves_output=True)
    g.done(masked)
    if s.dropout:
        dropped = g.op((soft,), size, extra=size // s.element)
        g.done(soft)
        soft = dropped
    out = g.op((soft, values), q.num_bytes, saves=(soft, values))
    g.done(soft, keys, values)
    return out
