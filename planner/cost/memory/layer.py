"""The memory of one transformer layer as `workers/trainer/model` computes it, tensor by tensor.

Functions that take a tensor leave it to the caller, except where they say that they drop it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from planner.cost.memory.autograd import Graph, Recomputed, Tensor
from planner.cost.memory.tape import BUFFERS, WORKING
from planner.cost.memory.tensor_parallel import (
    LayerInput,
    Matmul,
    copy_to_tensor_ranks,
    gather_input,
    reduce_output,
    regather,
    run_column_parallel,
    run_norm,
)
from planner.cost.resolved_plan import MicroBatch
from planner.facts.model_parts import MoeSpec
from planner.facts.model_shapes import count_expert_rows
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import FP32_BYTES


def run_layer(g: Graph, batch: MicroBatch, x: Tensor, *, moe: bool = False) -> Tensor:
    """Record the forward of a layer, which recompute may run again."""
    forward = partial(_run_layer, g, batch, moe=moe)
    if g.saving and (batch.recompute == "full" or batch.recomputes_operations):
        saved_bytes = count_saved_outputs(batch, moe=moe) if batch.recomputes_operations else 0
        return g.checkpoint((x,), forward, saved_bytes=saved_bytes, whole=batch.stack.recomputes_at_once)
    return forward(x)


def count_saved_outputs(batch: MicroBatch, *, moe: bool) -> int:
    """Return the bytes that op-level selective recompute saves of a layer in addition to its input.

    These are the outputs of every second matmul and of attention, and with sequence parallelism the scattered tensors
    (torchtitan, parallelize_llama.py, `_save_list`).
    """
    model, row = batch.model, batch.tokens * batch.element
    heads, kv_heads = model.num_heads // batch.tp, count_local_kv_heads(model.num_kv_heads, batch.tp)
    if mla := model.mla:
        attention = heads * mla.value_head_dim
        outputs = [mla.q_rank, mla.kv_rank + mla.rope_head_dim, model.hidden_size]
        if not mla.q_rank:
            outputs = [heads * (width + mla.nope_head_dim) for width in (mla.rope_head_dim, mla.value_head_dim)]
    else:
        attention, key = heads * model.head_size, kv_heads * model.head_size
        outputs = [attention + 2 * key] if model.arch == "gpt" else [attention, key]
    inner = model.ffn_hidden_size // batch.tp
    if moe and model.moe:
        outputs.append(model.moe.num_experts)
    else:
        outputs += [inner, model.hidden_size] if model.is_gated else [inner]
    scattered = 2 * batch.shard_bytes if batch.sequence_parallel else 0
    return row * (sum(outputs) + attention) + batch.tokens * heads * FP32_BYTES + scattered


def _run_layer(g: Graph, batch: MicroBatch, x: Tensor, *, moe: bool) -> Tensor:
    parts, feed = batch.model.parts, _run_experts if moe else _run_mlp
    if parts.num_norms == 1:
        return _run_single_norm_layer(g, batch, x, feed)
    attention = _run_sublayer(g, batch, x, _run_attention)
    after = _add_bias(g, batch, attention, bool(parts.out_bias))
    middle = g.add(x, after)
    if parts.out_bias:
        g.drop(after)
    made = _run_sublayer(g, batch, x if parts.parallel else middle, feed)
    after = made if moe else _add_bias(g, batch, made, bool(parts.mlp_bias))
    out = g.add(middle, after)
    if parts.mlp_bias and not moe:
        g.drop(after)
    g.drop(made, middle, attention)
    return out


def _run_single_norm_layer(
    g: Graph, batch: MicroBatch, x: Tensor, feed: Callable[[Graph, MicroBatch, LayerInput], Tensor]
) -> Tensor:
    """Record a layer whose attention and MLP read the output of one norm. Meshboard's trainer does not run it."""

    def run_both(g: Graph, batch: MicroBatch, entered: LayerInput) -> Tensor:
        attention, made = _run_attention(g, batch, entered), feed(g, batch, entered)
        total = g.add(attention, made)
        g.drop(attention, made)
        return total

    made = _run_sublayer(g, batch, x, run_both)
    out = g.add(x, made)
    g.drop(made)
    return out


def _add_bias(g: Graph, batch: MicroBatch, x: Tensor, bias: bool) -> Tensor:
    saved = g.save_bytes(x.num_bytes // batch.element) if batch.dropout else []  # the mask
    g.record(lambda: g.release(saved))
    return g.copy(x) if bias else x


def _run_sublayer(
    g: Graph, batch: MicroBatch, x: Tensor, inside: Callable[[Graph, MicroBatch, LayerInput], Tensor]
) -> Tensor:
    """Record a norm, the gather of tensor parallelism, `inside`, and the reduction."""
    normed = run_norm(g, x)
    entered = gather_input(g, batch, normed)
    whole = entered.whole
    if batch.recomputes_light and (batch.regather or not batch.sequence_parallel):
        whole.recomputed = regather(batch, entered, extra=normed.num_bytes)
        g.keep_until_backward(x)  # the input of the norm
    elif batch.regather and batch.recompute != "full":
        whole.recomputed = regather(batch, entered)
        g.keep_until_backward(normed)
    out = reduce_output(g, batch, inside(g, batch, entered))
    g.drop(normed, whole)
    if batch.model.parts.num_norms < 4:
        return out
    normed_out = run_norm(g, out)
    g.drop(out)
    return normed_out


# Attention: fused, in blocks of a ring, latent, or with all scores in memory.


def _run_attention(g: Graph, batch: MicroBatch, x: LayerInput) -> Tensor:
    model = batch.model
    if model.mla:
        whole = copy_to_tensor_ranks(g, batch, x)
        out = _run_latent_attention(g, batch, whole)
        g.drop(whole)
        return out
    heads, kv_heads = model.num_heads // batch.tp, count_local_kv_heads(model.num_kv_heads, batch.tp)
    row = batch.tokens * batch.element
    query, key = row * heads * model.head_size, row * kv_heads * model.head_size
    h, rope = model.hidden_size, model.has_rope
    matmuls = (
        Matmul(query, h * heads * model.head_size, clones=rope and heads > 1),
        Matmul(key, h * kv_heads * model.head_size, clones=rope and kv_heads > 1),
        Matmul(key, h * kv_heads * model.head_size),
    )
    q, k, v = projections = run_column_parallel(g, batch, x, matmuls)
    made = [*projections]
    if model.parts.query_norm != "none":
        q, k = (run_norm(g, rows) for rows in (q, k))
        made += [q, k]
    if rope:  # cosines and sines belong to the rank
        q, k = (g.apply((rows,), rows.num_bytes) for rows in (q, k))
    mixed = _attend(g, batch, q, k, v, heads=heads, out_bytes=query)
    values = g.copy(mixed) if rope and heads > 1 else mixed
    out = g.linear(values, batch.hidden_bytes, heads * model.head_size * h)
    g.drop(*{mixed, values, q, k, *made})  # local names of the trainer until attention returns
    return out


def _attend(g: Graph, batch: MicroBatch, q: Tensor, k: Tensor, v: Tensor, *, heads: int, out_bytes: int) -> Tensor:
    log_sums = batch.tokens * heads * FP32_BYTES  # log-sum-exp of each query
    if batch.cp > 1 or (batch.has_documents and batch.attention == "fused"):
        return _attend_by_blocks(g, batch, q, k, v, log_sums, heads=heads, out_bytes=out_bytes)
    if batch.attention == "fused":
        return g.apply((q, k, v), out_bytes, saves=(q, k, v), extra=log_sums, saves_output=True)
    forward = partial(_attend_unfused, g, batch, heads=heads, out_bytes=out_bytes)
    if batch.recompute == "selective" and g.saving:  # saves only queries, keys, and values
        return g.checkpoint((q, k, v), forward, whole=batch.stack.recomputes_at_once)
    return forward(q, k, v)


def _attend_by_blocks(
    g: Graph, batch: MicroBatch, q: Tensor, k: Tensor, v: Tensor, log_sums: int, *, heads: int, out_bytes: int
) -> Tensor:
    """Attend to the keys and values of one cp rank at a time, and add outputs and query gradients in fp32."""
    tape, mixed = g.tape, batch.element != FP32_BYTES
    wide, wide_q = (size // batch.element * FP32_BYTES for size in (out_bytes, q.num_bytes))
    pair, ring = k.num_bytes + v.num_bytes, batch.ring
    block = g.allocate(pair)
    num_others = 0 if batch.cp == 1 else 2 if ring and batch.cp > 2 else 1 if ring else batch.cp
    others = pair * num_others
    received = tape.take(others, BUFFERS)
    staging = 0 if ring or batch.cp == 1 else batch.get_staging_bytes(others)
    tape.touch(staging, BUFFERS)
    total = tape.take(wide, WORKING)
    saved_sums = g.save_bytes(log_sums)
    tape.touch(out_bytes + max(_count_mask_bytes(batch), wide if mixed else 0), WORKING)
    tape.drop(received)
    out = g.allocate(out_bytes) if mixed else Tensor(tape.hold(total))
    tape.drop(total)
    saved = [*g.save(q, block, out), *saved_sums]
    g.drop(block)

    def backward() -> None:
        grad = g.take_grad(out)
        if heads > 1:
            ordered = tape.take(out_bytes, WORKING)
            tape.drop(grad)
            grad = ordered
        total = tape.take(wide_q, WORKING)
        received = tape.take(others, BUFFERS)
        tape.touch(staging, BUFFERS)
        found = tape.take(q.num_bytes + pair, WORKING)
        tape.touch(_count_mask_bytes(batch), WORKING)
        moving = tape.take(pair * (1 if batch.cp == 1 else 4 if ring else 2 * batch.cp), BUFFERS)
        # A reduce-scatter allocates the rank's own block while all its inputs are allocated.
        early = None if ring or batch.cp == 1 else tape.take(pair, WORKING)
        tape.touch(staging, BUFFERS)
        tape.drop(found, moving, received)
        if mixed:
            made = tape.take(q.num_bytes, WORKING)
            tape.drop(total)
        else:
            made = total
        both = early or tape.take(pair, WORKING)
        tape.drop(grad)
        g.release(saved)
        halves = [tape.take(x.num_bytes, WORKING) for x in (k, v)]
        tape.drop(both)
        g.add_grad(q, made)
        for tensor, half in zip((k, v), halves, strict=True):
            g.add_grad(tensor, half)

    g.record(backward)
    return out


def _count_mask_bytes(batch: MicroBatch) -> int:
    """Return the bytes of the mask between documents of one sequence, and of the bias that it becomes."""
    length = batch.tokens // batch.sequences
    return length * length * (batch.element + 1) if batch.has_documents else 0


def _run_latent_attention(g: Graph, batch: MicroBatch, x: Tensor) -> Tensor:
    """Record low-rank queries, keys, and values (2405.04434 section 2.1). Meshboard's trainer does not run it."""
    mla, heads, h = batch.model.mla, batch.model.num_heads // batch.tp, batch.model.hidden_size
    assert mla is not None
    row = batch.tokens * batch.element
    latent = mla.q_rank + mla.kv_rank + mla.rope_head_dim
    width = heads * (mla.nope_head_dim + mla.rope_head_dim)
    values = heads * mla.value_head_dim
    down = g.linear(x, row * latent, h * latent)
    normed = g.apply((down,), row * (mla.q_rank + mla.kv_rank), saves=(down,))
    g.drop(down)
    q = g.linear(normed if mla.q_rank else x, row * width, (mla.q_rank or h) * width)
    k = g.linear(normed, row * width, mla.kv_rank * heads * mla.nope_head_dim)
    v = g.linear(normed, row * values, mla.kv_rank * values)
    g.drop(normed)
    mixed = _attend(g, batch, q, k, v, heads=heads, out_bytes=row * values)
    g.drop(q, k, v)
    out = g.linear(mixed, batch.hidden_bytes, values * h)
    g.drop(mixed)
    return out


def _attend_unfused(
    g: Graph, batch: MicroBatch, q: Tensor, k: Tensor, v: Tensor, *, heads: int, out_bytes: int
) -> Tensor:
    """Record scores, scale, mask, softmax, and weighted values, each with all scores (batch, heads, seq, seq)."""
    length = batch.tokens // batch.sequences
    size = batch.sequences * heads * length * length * batch.element
    keys, values = g.apply((k,), q.num_bytes), g.apply((v,), out_bytes)
    # With dropout, the kernels are those of Megatron in 2021, which recompute the mask.
    mask = g.allocate(0 if batch.dropout else length * length * (batch.sequences if batch.has_documents else 1))
    raw = g.apply((q, keys), size, saves=(q, keys))
    scaled = g.apply((raw,), size)
    g.drop(raw)
    masked = g.apply((scaled,), size, saves=(mask,))
    g.drop(scaled)
    soft = g.apply((masked,), size, saves_output=True)
    g.drop(masked)
    if batch.dropout:
        dropped = g.apply((soft,), size, extra=size // batch.element)
        g.drop(soft)
        soft = dropped
    out = g.apply((soft, values), out_bytes, saves=(soft, values))
    g.drop(soft, keys, values, mask)
    return out


# The MLP and the mixture of experts.


def _run_mlp(g: Graph, batch: MicroBatch, x: LayerInput) -> Tensor:
    """Record the MLP, which is gated for llama."""
    inner = batch.model.ffn_hidden_size // batch.tp
    matmul = Matmul(batch.tokens * inner * batch.element, batch.model.hidden_size * inner)
    up, *gates = run_column_parallel(g, batch, x, [matmul] * (2 if batch.model.is_gated else 1))
    return _run_down(g, batch, gates[0] if gates else None, up)


def _run_down(g: Graph, batch: MicroBatch, gate: Tensor | None, up: Tensor) -> Tensor:
    """Record the activation and the row-parallel matmul. Drops `gate` and `up`."""
    made = _activate(g, batch, gate, up, recomputes=batch.recomputes_light)
    weight = up.num_bytes // (batch.tokens * batch.element) * batch.model.hidden_size
    out = g.linear(made, batch.hidden_bytes, weight)
    g.drop(*([gate] if gate else []), up, made)
    return out


def _activate(g: Graph, batch: MicroBatch, gate: Tensor | None, up: Tensor, *, recomputes: bool) -> Tensor:
    """Record the activation. With `recomputes`, backward computes it again."""
    wide = up.num_bytes
    if gate is None or not batch.stack.saves_gate_activation:
        inputs = (up,) if gate is None else (gate, up)
        made, extra = g.apply(inputs, wide, saves=inputs), 0
    else:
        opened = g.apply((gate,), wide, saves=(gate,))
        if recomputes:
            opened.recomputed = Recomputed(wide, 0)
        made, extra = g.apply((opened, up), wide, saves=(opened, up)), wide
        g.drop(opened)
    if recomputes:
        made.recomputed = Recomputed(wide, extra)
    return made


def _run_experts(g: Graph, batch: MicroBatch, entering: LayerInput) -> Tensor:
    """Record router, routed experts, their weighted sum, and shared experts. Local names stay until the end."""
    moe, h = batch.model.moe, batch.model.hidden_size
    assert moe is not None
    x = copy_to_tensor_ranks(g, batch, entering)
    routed = batch.tokens * moe.experts_per_token
    is_fp32 = batch.element == FP32_BYTES
    wide = g.view(x) if is_fp32 else g.apply((x,), batch.tokens * h * FP32_BYTES)
    if is_fp32:
        wide.recomputed = x.recomputed  # a view of the regathered input
    scores = g.linear(wide, batch.tokens * moe.num_experts * FP32_BYTES, moe.num_experts * h, narrow=False)
    probabilities = g.apply((scores,), scores.num_bytes, saves_output=True)
    g.drop(wide, scores)
    answers, named = _run_routed_experts(g, batch, x, moe)
    gates = g.apply((probabilities,), routed * batch.element)
    weighed = g.apply((answers, gates), routed * h * batch.element, saves=(answers, gates))
    out = g.apply((weighed,), batch.hidden_bytes)
    g.drop(weighed, answers, probabilities, gates, *named)
    if moe.shared_experts:
        inner = moe.shared_size // batch.tp
        size = batch.tokens * inner * batch.element
        gate = g.linear(x, size, h * inner) if batch.model.is_gated else None
        shared = _run_down(g, batch, gate, g.linear(x, size, h * inner))
        alone, out = out, g.add(out, shared)
        g.drop(alone, shared)
    if moe.balance_loss:  # the last operation that saves its inputs
        g.save()
        g.record(lambda: None)
    g.drop(x)
    return out


def _run_routed_experts(g: Graph, batch: MicroBatch, x: Tensor, moe: MoeSpec) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Record dispatch, the matmuls of the experts, and combine. Returns the answers and other live local names."""
    h = batch.model.hidden_size
    row, inner = h * batch.element, moe.expert_ffn_hidden_size // batch.tp
    routed, weight = batch.tokens * moe.experts_per_token, moe.num_experts // batch.ep * inner * h
    drops = moe.capacity_factor is not None
    num_rows = count_expert_rows(moe, batch.tokens, batch.seq_len)
    named: tuple[Tensor, ...] = ()
    sent = g.apply((x,), routed * row)
    if drops:  # tokens are added into buffers of one size, and `index_add` saves its operand (torch 2.13)
        named, zeros = (sent,), g.allocate(num_rows * row)
        sent = g.apply((sent,), num_rows * row, saves=(sent,))
        g.drop(zeros)
    arrived = _copy_if(g, sent, batch.ep > 1)
    if not drops:
        g.drop(sent)
    # Rows arrive by rank and are ordered by expert. Buffers of a single expert per rank are in order.
    reorders = batch.ep > 1 and (not drops or moe.num_experts > batch.ep)
    rows = _copy_if(g, arrived, reorders)
    gate, up = (g.linear(rows, num_rows * inner * batch.element, weight, grouped=True) for _ in range(2))
    made = _activate(g, batch, gate, up, recomputes=False)
    g.drop(gate, up)
    outputs = g.linear(made, num_rows * row, weight, grouped=True)
    g.drop(made, rows)
    ordered = _copy_if(g, outputs, reorders)
    back = _copy_if(g, ordered, batch.ep > 1)
    if drops:
        padded = g.copy(back)  # with a row of zeros for dropped tokens
        g.drop(back)
        return g.apply((padded,), routed * row), (*named, sent, arrived, outputs, ordered, padded)
    g.drop(outputs)
    answers = g.apply((back,), routed * row)
    g.drop(back)
    return answers, (arrived, ordered)


def _copy_if(g: Graph, rows: Tensor, copies: bool) -> Tensor:
    return g.apply((rows,), rows.num_bytes) if copies else g.view(rows)
