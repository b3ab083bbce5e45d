"""What a layer computes, kernel by kernel: FLOP and bytes of each product and each pass over memory.

Forward and backward of one micro-batch on one rank, as a transformer without fusing compilers runs (2205.05198
figure 4 draws the same graph). `planner.hardware.cluster` turns a kernel into seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from planner.facts.model_shapes import count_expert_rows
from planner.facts.placements import get_vocab_rows
from planner.facts.precision import FP32_BYTES, get_mixed_precision
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.stages import get_micro_batch_tokens


class Gemm(NamedTuple):
    """`batch` products (m, k) x (k, n): 2 m n k FLOP each. `wide` ones stay in 16 bits where others run in fp8.
    `experts`: of so many that share a call, each of which the host launches by itself. `over_rows`: both operands
    have k rows, as where a weight's gradient is summed over tokens; else k is how long their rows are."""

    m: int
    n: int
    k: int
    batch: int = 1
    wide: bool = False
    experts: int = 0
    over_rows: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch


PassKind = Literal["norm", "scores", "casts", "loss", "other"]


class Pass(NamedTuple):
    """A kernel bound by memory that reads and writes `num_bytes`. Stacks differ in what they fuse: `kind` tells."""

    num_bytes: int
    kind: PassKind = "other"


class Flash(NamedTuple):
    """Fused causal attention by heads of `width`: `flops` counts only the scores that the mask leaves, `tokens` is the
    length of a row that has as many without a window."""

    flops: int
    num_bytes: int
    tokens: float
    width: int = 128


Kernel = Gemm | Pass | Flash


Halves = tuple[tuple[Kernel, ...], tuple[Kernel, ...]]  # of forward, of backward


# What of a layer selective recompute can repeat: norms, an MLP's activation, latent attention's second products, fused
# attention itself, a whole MLP that has no experts (Megatron's --recompute-modules).
Module = Literal["norms", "activation", "latents", "attention", "mlp"]


class Work(NamedTuple):
    """Kernels of a layer's forward, of the backward of its inputs, and of the backward of its weights.

    `repeated` are those of the forward that selective recompute repeats, `operations` those that it repeats where it
    keeps outputs of operations, `attention` those that need keys and values, `bias_sums` those of the backward of
    inputs that sum a bias' gradient where experts' MLPs are fused: the second product's, with the activation's.
    `needless` are those of the forward that backward needs nothing of: of a mixture the router's does.
    """

    forward: tuple[Kernel, ...]
    backward_input: tuple[Kernel, ...]
    backward_weight: tuple[Kernel, ...]
    repeated: tuple[Kernel, ...] = ()
    operations: tuple[Kernel, ...] = ()
    attention: tuple[Kernel, ...] = ()
    bias_sums: tuple[Kernel, ...] = ()
    needless: tuple[Kernel, ...] = ()


# Kernels too small to take the device's time, which the host launches all the same; chosen on Megatron-LM's own
# tests among the published rows, both halves: of a router, forward and backward, and of each further part of a ring.
ROUTER_KERNELS = 3
RING_KERNELS = 4
# Rows of queries in a further step of a balanced ring: half of them, or all on half of the keys (Transformer Engine's
# context_parallel.py).
RING_ROWS = 0.75
# Of a layer that ZeRO-3 shards, counted in FSDP2 (torch 2.13, _fsdp_collectives.py): shards copied in, gathered, copied
# out, and two events; in backward as many, and gradients copied in, reduced, divided, added up, with an event.
SHARD_KERNELS = (5, 10)
# Of latent attention: two norms of latents, queries and keys put together of their parts.
LATENT_KERNELS = 4
# Of an element that an expert gives, where its bias times its probability is added in fp32 by kernels of their own
# (Megatron's experts.py, `_apply_bias`: product, sum, concatenation, cast; in backward two sums over products).
BIAS_BYTES = (28, 32)
# Of an element that an expert's gate gives, where gate and up are clamped before their product (fused_bias_geglu.py,
# `weighted_bias_quick_geglu_impl`): two clamps and a concatenation; in backward two masks and a concatenation.
CLAMP_BYTES = ((4, 4, 8), (6, 6, 8))
# An element's largest is looked for, it is scaled, and it is narrowed, kernel by kernel (our products.py); and turned.
CAST_BYTES, TURN_BYTES = 2 + 4 + 3, 2
ALIGNED = 16  # tokens: what an expert takes is filled up to so many


def layer_work(
    spec: JobSpec,
    *,
    moe: bool = False,
    joined: bool = False,
    apart: bool = False,
    sorts: bool = False,
    norms_heads: bool = False,
    copies_queries: bool = False,
    casts_each: bool = False,
    repeats: Sequence[Module] | None = None,
) -> Work:
    """One transformer layer of one micro-batch on one rank.

    `joined`: queries, keys and values are one product, so are gate and up. `apart`: each expert's products are its own.
    `sorts`: what came is put in the experts' order by a pass, and back. `norms_heads`: queries and keys are normed.
    `copies_queries`: those of grouped heads are copied out of their product's result, turned apart from keys, and
    gradients put together.
    `casts_each`: what products in fp8 take is cast for each of them, weights too, by kernels of their own.
    Where every second layer sees a window, this layer is the mean of both kinds.
    `repeats`: what selective recompute repeats; scores where they are kernels of their own, else norms and activation.
    """
    inner = [*(_expert_products(spec, joined=joined, apart=apart) if moe else _mlp_products(spec, joined=joined))]
    products = [*_attention_products(spec, joined=joined), *inner]
    unfused = spec.train.attention == "unfused"
    scores = _unfused(spec) if unfused else _fused(spec)
    passes_forward, passes_backward = _passes(spec, moe=moe, sorts=sorts, norms_heads=norms_heads)
    copies_forward, copies_backward = _copies(spec) if copies_queries else ((), ())
    experts = spec.model.moe if moe else None
    clamps_forward, clamps_backward = _clamps(spec) if experts and experts.swiglu_limit else ((), ())
    casts_forward, casts_backward = _casts(spec, products, each=casts_each)
    latents = products[1:4:2] if spec.model.mla else []
    dense = [] if moe else inner
    usual: Sequence[Module] = ("attention",) if unfused else ("norms", "activation")
    modules: dict[Module, Sequence[Kernel]] = {
        "norms": passes_forward[0:3:2],
        "activation": (passes_forward[4], *clamps_forward),
        "latents": (*latents, *_casts(spec, latents, each=casts_each)[0]),
        "attention": scores[0],
        "mlp": (*dense, *_casts(spec, dense, each=casts_each)[0]),
    }
    return Work(
        forward=(*products, *scores[0], *passes_forward, *copies_forward, *clamps_forward, *casts_forward),
        backward_input=(
            *(_for_inputs(g) for g in products),
            *scores[1],
            *passes_backward,
            *copies_backward,
            *clamps_backward,
            *casts_backward,
        ),
        backward_weight=tuple(g._replace(m=g.n, n=g.k, k=g.m, over_rows=True) for g in products),
        repeated=tuple(kernel for name in (usual if repeats is None else repeats) for kernel in modules[name]),
        operations=(*products[1::2], *passes_forward, *clamps_forward, *casts_forward),
        attention=(*scores[0], *scores[1]),
        bias_sums=(_for_inputs(inner[2 if joined else 3]), passes_backward[4])
        if experts and experts.expert_bias
        else (),
        needless=() if moe else (inner[-1],),
    )


def _for_inputs(product: Gemm) -> Gemm:
    """The product of backward that gives the gradient of its input."""
    return product._replace(n=product.k, k=product.n)


def _attention_products(spec: JobSpec, *, joined: bool) -> Iterator[Gemm]:
    model, tp, tokens = spec.model, spec.layout.tp, get_micro_batch_tokens(spec)
    h, heads = model.hidden_size, model.num_heads // tp
    if model.mla:
        mla = model.mla
        yield Gemm(tokens, mla.q_rank, h)
        yield Gemm(tokens, heads * (mla.nope_head_dim + mla.rope_head_dim), mla.q_rank)
        yield Gemm(tokens, mla.kv_rank + mla.rope_head_dim, h)
        yield Gemm(tokens, heads * (mla.nope_head_dim + mla.value_head_dim), mla.kv_rank)
        yield Gemm(tokens, h, heads * mla.value_head_dim)
        return
    query, kv = heads * model.head_size, max(1, model.num_kv_heads // tp) * model.head_size
    if joined or model.arch == "gpt":
        yield Gemm(tokens, query + 2 * kv, h)
    else:
        yield from (Gemm(tokens, query, h), Gemm(tokens, kv, h), Gemm(tokens, kv, h))
    yield Gemm(tokens, h, query)


def _mlp_products(spec: JobSpec, *, joined: bool) -> Iterator[Gemm]:
    model, tokens = spec.model, get_micro_batch_tokens(spec)
    h, inner = model.hidden_size, model.ffn_hidden_size // spec.layout.tp
    yield from _widening(Gemm(tokens, inner, h), joined=joined, gated=model.arch == "llama")
    yield Gemm(tokens, h, inner)


def _widening(one: Gemm, *, joined: bool, gated: bool = True) -> list[Gemm]:
    """An MLP's first product, or its two."""
    if not gated:
        return [one]
    return [one._replace(n=2 * one.n)] if joined else [one] * 2


def _expert_products(spec: JobSpec, *, joined: bool, apart: bool) -> Iterator[Gemm]:
    """Router, routed experts (tokens spread evenly), shared experts."""
    model, layout, moe = spec.model, spec.layout, spec.model.moe
    assert moe is not None
    tokens, h = get_micro_batch_tokens(spec), model.hidden_size
    inner, local = moe.expert_ffn_hidden_size // layout.tp, moe.num_experts // layout.ep
    routed = -(-count_expert_rows(moe, tokens, spec.train.seq_len) // (local * ALIGNED)) * ALIGNED
    yield Gemm(tokens, moe.num_experts, h, wide=True)
    calls, batch, experts = (local, 1, 0) if apart else (1, local, local)
    for _ in range(calls):
        yield from _widening(Gemm(routed, inner, h, batch, experts=experts), joined=joined)
        yield Gemm(routed, h, inner, batch, experts=experts)
    if moe.shared_experts:
        yield from _widening(Gemm(tokens, moe.shared_experts * inner, h), joined=joined)
        yield Gemm(tokens, h, moe.shared_experts * inner)


def _casts(spec: JobSpec, products: Sequence[Gemm], *, each: bool) -> Halves:
    """What fp8 asks of every product: its input, and in backward its output's gradient, read in 16 bits and written in
    8, also transposed. Weights are cast once a step, unless `each` product has all that it takes cast for it: once in
    forward, and in backward again, transposed."""
    if get_mixed_precision(spec.train.precision).gemm != "fp8":
        return (), ()
    narrow = [g for g in products if not g.wide]
    inputs = dict.fromkeys((g.m, g.k, g.batch) for g in narrow)  # products of one input share its cast
    if each:
        entered = [*(m * k * batch for m, k, batch in inputs), *(g.n * g.k * g.batch for g in narrow)]
        gradients = [g.m * g.n * g.batch for g in narrow]
        return tuple(Pass(CAST_BYTES * x, "casts") for x in entered), tuple(
            Pass((CAST_BYTES + TURN_BYTES) * x, "casts") for x in (*entered, *gradients)
        )
    forward = tuple(Pass(4 * m * k * batch, "casts") for m, k, batch in inputs)
    return forward, tuple(Pass(4 * g.m * g.n * g.batch, "casts") for g in narrow)


def _unfused(spec: JobSpec) -> Halves:
    """Scores, softmax, dropout and weighted values as kernels of their own; the mask saves no work."""
    model, train = spec.model, spec.train
    s, e = train.seq_len, get_mixed_precision(train.precision).compute_bytes
    batch = spec.micro_batch_size * model.num_heads // spec.layout.tp
    rows = s // spec.layout.cp
    elements = batch * rows * s
    qk, v = _head_sizes(model)
    scores, values = Gemm(rows, s, qk, batch, wide=True), Gemm(rows, v, s, batch, wide=True)
    forward: list[Kernel] = [scores, Pass(2 * e * elements, "scores"), values]
    backward: list[Kernel] = [scores, values, scores, values, Pass(3 * e * elements, "scores")]
    if train.dropout:
        forward.append(Pass((2 * e + 1) * elements, "scores"))
        backward.append(Pass((2 * e + 1) * elements, "scores"))
    return tuple(forward), tuple(backward)


def _fused(spec: JobSpec) -> Halves:
    """FlashAttention (2205.14135): half the scores under a causal mask; backward does 5 products to forward's 2.

    Our trainer keeps to documents by what is added to scores, made for each sequence (`workers.trainer.parallel
    .documents`): then later keys of a rank's own part are computed too.
    """
    model, train, tokens = spec.model, spec.train, get_micro_batch_tokens(spec)
    heads, e = model.num_heads // spec.layout.tp, get_mixed_precision(train.precision).compute_bytes
    qk, v = _head_sizes(model)
    seen, hides = _looked_back(model.sliding_window, train.seq_len), tuple[Pass, ...]()
    if train.document_end is not None and spec.resources.stack == "ours":
        seen *= 1 + 1 / spec.layout.cp
        hides = (Pass(round((e + 1) * seen * tokens * train.seq_len)),)  # written and read, of half as many scores
    flops = round(seen * tokens * train.seq_len * heads * (qk + v))  # 2 FLOP, halved by the mask
    size = 2 * tokens * heads * (qk + v) * e
    again = (Pass(0),) * (RING_KERNELS * (spec.layout.cp - 1))
    rows = 1 + RING_ROWS * (spec.layout.cp - 1)
    forward = Flash(flops, size, seen * train.seq_len / rows, qk)
    backward = forward._replace(flops=flops * 5 // 2, num_bytes=2 * size)
    return (forward, *hides, *again), (backward, *hides, *again)


def _head_sizes(model: ModelSpec) -> tuple[int, int]:
    """Of queries and keys, and of values."""
    if model.mla:
        return model.mla.nope_head_dim + model.mla.rope_head_dim, model.mla.value_head_dim
    return model.head_size, model.head_size


def _looked_back(window: int | None, seq_len: int) -> float:
    """Share of the causal scores that are computed where the queries of every second layer see only a window."""
    share = min(1.0, window / seq_len) if window else 1.0
    return (1 + share * (2 - share)) / 2


def _passes(spec: JobSpec, *, moe: bool, sorts: bool, norms_heads: bool) -> Halves:
    """Norms, residuals with bias and dropout, and the MLP's activation, as bytes read and written."""
    model, layout, train = spec.model, spec.layout, spec.train
    e = get_mixed_precision(train.precision).compute_bytes
    tokens = get_micro_batch_tokens(spec)
    hidden = tokens * model.hidden_size // (layout.tp if layout.sequence_parallel else 1)
    if moe and model.moe:
        rows = count_expert_rows(model.moe, tokens, train.seq_len)
        inner = (rows + tokens * model.moe.shared_experts) * model.moe.expert_ffn_hidden_size // layout.tp
    else:
        inner = tokens * model.ffn_hidden_size // layout.tp
    mask = hidden if train.dropout else 0
    norm, norm_backward = Pass(2 * e * hidden, "norm"), Pass(3 * e * hidden, "norm")
    residual, residual_backward = Pass(3 * e * hidden + mask), Pass(2 * e * hidden + mask)
    reads = 2 if model.arch == "llama" else 1
    activation, activation_backward = Pass((reads + 1) * e * inner), Pass((2 * reads + 1) * e * inner)
    forward: list[Kernel] = [norm, residual, norm, residual, activation]
    backward: list[Kernel] = [norm_backward, residual_backward, norm_backward, residual_backward, activation_backward]
    if model.arch == "llama":
        rope = Pass(2 * e * tokens * (model.num_heads + model.num_kv_heads) // layout.tp * model.head_size)
        forward.append(rope)
        backward.append(rope)
    if norms_heads:
        for heads in (model.num_heads, model.num_kv_heads):
            size = e * tokens * heads // layout.tp * model.head_size
            forward.append(Pass(2 * size, "norm"))
            backward.append(Pass(3 * size, "norm"))
    small = LATENT_KERNELS if model.mla else 0
    sharded = SHARD_KERNELS if layout.zero == 3 else (0, 0)
    forward += [Pass(0)] * (small + sharded[0])
    backward += [Pass(0)] * (small + sharded[1])
    if moe and model.moe:
        permute = Pass(e * (tokens * model.moe.experts_per_token + rows) * model.hidden_size)
        again = 2 if sorts and layout.ep < model.moe.num_experts else 0  # there and back
        forward += [*[permute] * (2 + again), *[Pass(0)] * ROUTER_KERNELS]
        backward += [*[permute] * (2 + again), *[Pass(0)] * ROUTER_KERNELS]
        if model.moe.expert_bias:
            given = rows * model.hidden_size
            forward.append(Pass(BIAS_BYTES[0] * given))
            backward.append(Pass(BIAS_BYTES[1] * given))
    return tuple(forward), tuple(backward)


def _copies(spec: JobSpec) -> Halves:
    """Of grouped queries: their keys are turned by a kernel more, they are copied where a rank has several groups, of
    which each has its queries beside its key and value, and in backward all three are copied."""
    model, tp = spec.model, spec.layout.tp
    if model.mla or model.arch != "llama" or model.num_kv_heads == model.num_heads:
        return (), ()
    head = 2 * get_mixed_precision(spec.train.precision).compute_bytes * get_micro_batch_tokens(spec) * model.head_size
    queries, keys = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    apart = (Pass(head * queries),) if keys > 1 else ()
    return (*apart, Pass(0)), (Pass(head * (queries + 2 * keys)), Pass(0))


def _clamps(spec: JobSpec) -> Halves:
    moe = spec.model.moe
    assert moe is not None
    rows = count_expert_rows(moe, get_micro_batch_tokens(spec), spec.train.seq_len)
    inner = rows * moe.expert_ffn_hidden_size // spec.layout.tp
    forward, backward = (tuple(Pass(size * inner) for size in sizes) for sizes in CLAMP_BYTES)
    return forward, backward


def embedding_work(spec: JobSpec) -> Work:
    """Rows looked up, and their gradients added into the table."""
    size = (
        get_micro_batch_tokens(spec) * spec.model.hidden_size * get_mixed_precision(spec.train.precision).compute_bytes
    )
    return Work((Pass(3 * size),), (), (Pass(3 * size),))


def head_work(spec: JobSpec, *, gathers_logits: bool = False, narrow: bool = False) -> Work:
    """Final norm, the product with the vocabulary, and the loss: fp32 logits are read and written several times, those
    of the whole vocabulary where each tensor rank gathers them. `narrow`: the product runs in fp8 where others do."""
    model, tokens = spec.model, get_micro_batch_tokens(spec)
    e = get_mixed_precision(spec.train.precision).compute_bytes
    h, vocab = model.hidden_size, get_vocab_rows(spec)
    logits = tokens * vocab * (spec.layout.tp if gathers_logits else 1)
    product = Gemm(tokens, vocab, h, wide=not narrow)
    cast, softmax = Pass((e + FP32_BYTES) * logits, "loss"), Pass(3 * FP32_BYTES * logits, "loss")
    return Work(
        forward=(Pass(2 * e * tokens * h), product, cast, softmax),
        backward_input=(
            Pass(2 * FP32_BYTES * logits, "loss"),
            cast,
            product._replace(n=h, k=vocab),
            Pass(3 * e * tokens * h),
        ),
        backward_weight=(product._replace(m=vocab, n=h, k=tokens, over_rows=True),),
    )
