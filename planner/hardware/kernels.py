"""List the kernels of a layer with their FLOPs and bytes.

Kernels are those of one micro-batch on one rank, without a fusing compiler (2205.05198 figure 4).
`planner.hardware.kernel_time` computes their time.
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
    """`batch` matmuls (m, k) x (k, n) with 2 m n k FLOPs each.

    `wide`: stays in 16 bits even if other matmuls use fp8.
    `experts`: number of experts in one grouped call; the host launches each separately.
    `over_rows`: both operands have k rows, as in a weight gradient. Otherwise k is the row length.
    """

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


MemoryKernelKind = Literal["norm", "scores", "casts", "loss", "other"]


class MemoryKernel(NamedTuple):
    """Memory-bound kernel that reads and writes `num_bytes`.

    Stacks fuse each `kind` differently.
    """

    num_bytes: int
    kind: MemoryKernelKind = "other"


class FlashAttention(NamedTuple):
    """Fused causal attention with heads of `width`.

    `flops` counts only scores inside the mask. `tokens` is the row length with as many scores without a window.
    """

    flops: int
    num_bytes: int
    tokens: float
    width: int = 128


Kernel = Gemm | MemoryKernel | FlashAttention


ForwardBackward = tuple[tuple[Kernel, ...], tuple[Kernel, ...]]  # (forward, backward)


# Modules that selective recompute can repeat (Megatron's --recompute-modules): norms, activation of the MLP,
# up-projections of latent attention, fused attention, or a dense MLP.


class ModuleKernels(NamedTuple):
    """Kernels of forward, backward of inputs, and backward of weights.

    `recomputed`: forward kernels that selective recompute repeats.
    `recomputed_operations`: forward kernels that selective recompute of single operations repeats.
    `attention`: kernels that need keys and values.
    `unused_in_backward`: forward kernels whose output backward does not need. An expert layer needs the router's.
    """

    forward: tuple[Kernel, ...]
    backward_input: tuple[Kernel, ...]
    backward_weight: tuple[Kernel, ...]
    recomputed: tuple[Kernel, ...] = ()
    recomputed_operations: tuple[Kernel, ...] = ()
    attention: tuple[Kernel, ...] = ()
    unused_in_backward: tuple[Kernel, ...] = ()


# Kernels that take host time but no device time, chosen on Megatron-LM's own tests in the published rows: of a router
# in forward and in backward, and of each additional step of a ring.
ROUTER_KERNELS = 3
RING_KERNELS = 4
# Rows of queries in an additional step of a balanced ring: half of them, or all with half of the keys (Transformer
# Engine's context_parallel.py).
RING_ROW_FRACTION = 0.75
# (forward, backward) of a layer with ZeRO-3, counted in FSDP2 (torch 2.13, _fsdp_collectives.py): copy-in, all-gather,
# copy-out, and two events. Backward adds copy-in, reduce-scatter, division, and sum of gradients, with an event.
SHARD_KERNELS = (5, 10)
# Latent attention: two norms, and two concatenations of queries and keys.
LATENT_KERNELS = 4
# Bytes per output element of an expert, if separate kernels add bias times probability in fp32 (Megatron's experts.py,
# `_apply_bias`: product, sum, concatenation, cast; in backward two sums over products).
BIAS_BYTES = (28, 32)
# Bytes per gate element of a clamped expert (fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`): two clamps and a
# concatenation; in backward two masks and a concatenation.
CLAMP_BYTES = ((4, 4, 8), (6, 6, 8))
# Bytes per element: find the maximum, scale, and cast (workers/trainer products), and transpose.
CAST_BYTES, TRANSPOSE_BYTES = 2 + 4 + 3, 2
EXPERT_TOKEN_MULTIPLE = 16  # An expert's tokens are padded to a multiple of this number.


def build_layer_kernels(
    spec: JobSpec,
    *,
    moe: bool = False,
    fused_projections: bool = False,
    sorts_tokens: bool = False,
    copies_queries: bool = False,
    casts_all_operands: bool = False,
) -> ModuleKernels:
    """Return the kernels of one transformer layer.

    With a sliding window in some layers, the result is the mean of both kinds of layer.

    Args:
        fused_projections: Query, key, and value are one matmul, and gate and up are one matmul.
        sorts_tokens: A kernel sorts tokens by expert, and another restores their order.
        copies_queries: Grouped queries are copied out of the output of the fused projection, RoPE runs separately for
            queries and keys, and gradients are concatenated.
        casts_all_operands: Separate kernels cast all operands of each fp8 matmul, including weights.
    """
    inner = [
        *(_get_expert_gemms(spec, joined=fused_projections) if moe else _get_mlp_gemms(spec, joined=fused_projections))
    ]
    products = [*_get_attention_gemms(spec, joined=fused_projections), *inner]
    unfused = spec.train.attention == "unfused"
    scores = _get_unfused_attention(spec) if unfused else _get_fused_attention(spec)
    passes_forward, passes_backward = _get_memory_kernels(spec, moe=moe, sorts=sorts_tokens)
    copies_forward, copies_backward = _get_query_copies(spec) if copies_queries else ((), ())
    experts = spec.model.moe if moe else None
    clamps_forward, clamps_backward = _get_clamps(spec) if experts and experts.swiglu_limit else ((), ())
    casts_forward, casts_backward = _get_casts(spec, products, each=casts_all_operands)
    return ModuleKernels(
        forward=(*products, *scores[0], *passes_forward, *copies_forward, *clamps_forward, *casts_forward),
        backward_input=(
            *(_get_input_gradient(g) for g in products),
            *scores[1],
            *passes_backward,
            *copies_backward,
            *clamps_backward,
            *casts_backward,
        ),
        backward_weight=tuple(g._replace(m=g.n, n=g.k, k=g.m, over_rows=True) for g in products),
        recomputed=scores[0] if unfused else (*passes_forward[0:3:2], passes_forward[4], *clamps_forward),
        recomputed_operations=(*products[1::2], *passes_forward, *clamps_forward, *casts_forward),
        attention=(*scores[0], *scores[1]),
        unused_in_backward=() if moe else (inner[-1],),
    )


def _get_input_gradient(product: Gemm) -> Gemm:
    """Return the backward matmul that computes the gradient of the input."""
    return product._replace(n=product.k, k=product.n)


def _get_attention_gemms(spec: JobSpec, *, joined: bool) -> Iterator[Gemm]:
    model, tp, tokens = spec.model, spec.layout.tp, get_micro_batch_tokens(spec)
    h, heads = model.hidden_size, model.num_heads // tp
    if model.mla:
        mla = model.mla
        if mla.q_rank:
            yield Gemm(tokens, mla.q_rank, h)
        yield Gemm(tokens, heads * (mla.nope_head_dim + mla.rope_head_dim), mla.q_rank or h)
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


def _get_mlp_gemms(spec: JobSpec, *, joined: bool) -> Iterator[Gemm]:
    model, tokens = spec.model, get_micro_batch_tokens(spec)
    h, inner = model.hidden_size, model.ffn_hidden_size // spec.layout.tp
    yield from _get_first_mlp_gemms(Gemm(tokens, inner, h), joined=joined, gated=model.is_gated)
    yield Gemm(tokens, h, inner)


def _get_first_mlp_gemms(one: Gemm, *, joined: bool, gated: bool = True) -> list[Gemm]:
    """Return the first matmul of an MLP, or both if it is gated."""
    if not gated:
        return [one]
    return [one._replace(n=2 * one.n)] if joined else [one] * 2


def _get_expert_gemms(spec: JobSpec, *, joined: bool) -> Iterator[Gemm]:
    """Yield the matmuls of router, routed experts, and shared experts.

    Tokens are evenly spread over the routed experts.
    """
    model, layout, moe = spec.model, spec.layout, spec.model.moe
    assert moe is not None
    tokens, h = get_micro_batch_tokens(spec), model.hidden_size
    inner, local = moe.expert_ffn_hidden_size // layout.tp, moe.num_experts // layout.ep
    routed = (
        -(-count_expert_rows(moe, tokens, spec.train.seq_len) // (local * EXPERT_TOKEN_MULTIPLE))
        * EXPERT_TOKEN_MULTIPLE
    )
    yield Gemm(tokens, moe.num_experts, h, wide=True)
    yield from _get_first_mlp_gemms(Gemm(routed, inner, h, local, experts=local), joined=joined)
    yield Gemm(routed, h, inner, local, experts=local)
    if moe.shared_experts:
        shared = moe.shared_size // layout.tp
        yield from _get_first_mlp_gemms(Gemm(tokens, shared, h), joined=joined)
        yield Gemm(tokens, h, shared)


def _get_casts(spec: JobSpec, products: Sequence[Gemm], *, each: bool) -> ForwardBackward:
    """Return the casts to fp8: inputs in forward, output gradients in backward.

    A cast reads 16 bits and writes 8 bits twice, once transposed. Weights are cast once per step. With `each`, every
    matmul
    casts all operands in forward, and again transposed in backward.
    """
    if get_mixed_precision(spec.train.precision).gemm != "fp8":
        return (), ()
    narrow = [g for g in products if not g.wide]
    inputs = dict.fromkeys((g.m, g.k, g.batch) for g in narrow)  # Matmuls with the same input share its cast.
    if each:
        entered = [*(m * k * batch for m, k, batch in inputs), *(g.n * g.k * g.batch for g in narrow)]
        gradients = [g.m * g.n * g.batch for g in narrow]
        return tuple(MemoryKernel(CAST_BYTES * x, "casts") for x in entered), tuple(
            MemoryKernel((CAST_BYTES + TRANSPOSE_BYTES) * x, "casts") for x in (*entered, *gradients)
        )
    forward = tuple(MemoryKernel(4 * m * k * batch, "casts") for m, k, batch in inputs)
    return forward, tuple(MemoryKernel(4 * g.m * g.n * g.batch, "casts") for g in narrow)


def _get_unfused_attention(spec: JobSpec) -> ForwardBackward:
    """Return scores, softmax, dropout, and weighted values. The mask saves no work."""
    model, train = spec.model, spec.train
    s, e = train.seq_len, get_mixed_precision(train.precision).compute_bytes
    batch = spec.micro_batch_size * model.num_heads // spec.layout.tp
    rows = s // spec.layout.cp
    elements = batch * rows * s
    qk, v = _get_head_dims(model)
    scores, values = Gemm(rows, s, qk, batch, wide=True), Gemm(rows, v, s, batch, wide=True)
    forward: list[Kernel] = [scores, MemoryKernel(2 * e * elements, "scores"), values]
    backward: list[Kernel] = [scores, values, scores, values, MemoryKernel(3 * e * elements, "scores")]
    if train.dropout:
        forward.append(MemoryKernel((2 * e + 1) * elements, "scores"))
        backward.append(MemoryKernel((2 * e + 1) * elements, "scores"))
    return tuple(forward), tuple(backward)


def _get_fused_attention(spec: JobSpec) -> ForwardBackward:
    """Return FlashAttention kernels (2205.14135).

    They compute half the scores because of the mask. Backward has 2.5 times the FLOPs.

    Meshboard's trainer limits attention to documents with a bias per sequence (`workers.trainer.parallel.documents`).
    Then a rank also computes the masked scores of its own shard.
    """
    model, train, tokens = spec.model, spec.train, get_micro_batch_tokens(spec)
    heads, e = model.num_heads // spec.layout.tp, get_mixed_precision(train.precision).compute_bytes
    qk, v = _get_head_dims(model)
    seen, hides = _get_window_fraction(model, train.seq_len), tuple[MemoryKernel, ...]()
    if train.document_end is not None and spec.resources.stack == "ours":
        seen *= 1 + 1 / spec.layout.cp
        hides = (MemoryKernel(round((e + 1) * seen * tokens * train.seq_len)),)  # written and read, for half the scores
    flops = round(seen * tokens * train.seq_len * heads * (qk + v))  # 2 FLOPs, halved by the mask
    size = 2 * tokens * heads * (qk + v) * e
    again = (MemoryKernel(0),) * (RING_KERNELS * (spec.layout.cp - 1))
    rows = 1 + RING_ROW_FRACTION * (spec.layout.cp - 1)
    forward = FlashAttention(flops, size, seen * train.seq_len / rows, qk)
    backward = forward._replace(flops=flops * 5 // 2, num_bytes=2 * size)
    return (forward, *hides, *again), (backward, *hides, *again)


def _get_head_dims(model: ModelSpec) -> tuple[int, int]:
    """Return the head dims of queries and keys, and of values."""
    if model.mla:
        return model.mla.nope_head_dim + model.mla.rope_head_dim, model.mla.value_head_dim
    return model.head_size, model.head_size


def _get_window_fraction(model: ModelSpec, seq_len: int) -> float:
    """Return the fraction of causal scores that are inside the windows, as the mean over layers."""
    window, windowed = model.sliding_window, model.parts.windowed_layers
    share = min(1.0, window / seq_len) if window else 1.0
    if windowed is None:
        return (1 + share * (2 - share)) / 2
    return 1 - windowed / model.num_layers * (1 - share * (2 - share))


def _get_memory_kernels(spec: JobSpec, *, moe: bool, sorts: bool) -> ForwardBackward:
    """Return norms, residuals with bias and dropout, and activation as memory kernels."""
    model, layout, train = spec.model, spec.layout, spec.train
    e = get_mixed_precision(train.precision).compute_bytes
    tokens = get_micro_batch_tokens(spec)
    hidden = tokens * model.hidden_size // (layout.tp if layout.sequence_parallel else 1)
    if moe and model.moe:
        rows = count_expert_rows(model.moe, tokens, train.seq_len)
        inner = (rows * model.moe.expert_ffn_hidden_size + tokens * model.moe.shared_size) // layout.tp
    else:
        inner = tokens * model.ffn_hidden_size // layout.tp
    mask = hidden if train.dropout else 0
    norm, norm_backward = MemoryKernel(2 * e * hidden, "norm"), MemoryKernel(3 * e * hidden, "norm")
    residual, residual_backward = MemoryKernel(3 * e * hidden + mask), MemoryKernel(2 * e * hidden + mask)
    reads = 2 if model.is_gated else 1
    activation, activation_backward = MemoryKernel((reads + 1) * e * inner), MemoryKernel((2 * reads + 1) * e * inner)
    forward: list[Kernel] = [norm, residual, norm, residual, activation]
    backward: list[Kernel] = [norm_backward, residual_backward, norm_backward, residual_backward, activation_backward]
    if model.parts.num_norms == 1:
        forward[2] = backward[2] = MemoryKernel(0)
    elif model.parts.num_norms == 4:
        forward += [norm] * 2
        backward += [norm_backward] * 2
    if model.has_rope:
        rope = MemoryKernel(2 * e * tokens * (model.num_heads + model.num_kv_heads) // layout.tp * model.head_size)
        forward.append(rope)
        backward.append(rope)
    if model.parts.query_norm != "none":
        for heads in (model.num_heads, model.num_kv_heads):
            size = e * tokens * heads // layout.tp * model.head_size
            forward.append(MemoryKernel(2 * size, "norm"))
            backward.append(MemoryKernel(3 * size, "norm"))
    small = LATENT_KERNELS if model.mla else 0
    sharded = SHARD_KERNELS if layout.zero == 3 else (0, 0)
    forward += [MemoryKernel(0)] * (small + sharded[0])
    backward += [MemoryKernel(0)] * (small + sharded[1])
    if moe and model.moe:
        permute = MemoryKernel(e * (tokens * model.moe.experts_per_token + rows) * model.hidden_size)
        again = 2 if sorts and layout.ep < model.moe.num_experts else 0  # once per direction
        forward += [*[permute] * (2 + again), *[MemoryKernel(0)] * ROUTER_KERNELS]
        backward += [*[permute] * (2 + again), *[MemoryKernel(0)] * ROUTER_KERNELS]
        if model.moe.expert_bias:
            elements = rows * model.hidden_size
            forward.append(MemoryKernel(BIAS_BYTES[0] * elements))
            backward.append(MemoryKernel(BIAS_BYTES[1] * elements))
    return tuple(forward), tuple(backward)


def _get_query_copies(spec: JobSpec) -> ForwardBackward:
    """Return the copies of grouped queries.

    A rank with several groups copies its queries out of the fused projection. Keys have a separate RoPE kernel.
    Backward copies the gradients of all three.
    """
    model, tp = spec.model, spec.layout.tp
    if model.mla or model.arch != "llama" or model.num_kv_heads == model.num_heads:
        return (), ()
    head = 2 * get_mixed_precision(spec.train.precision).compute_bytes * get_micro_batch_tokens(spec) * model.head_size
    queries, keys = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    apart = (MemoryKernel(head * queries),) if keys > 1 else ()
    return (*apart, MemoryKernel(0)), (MemoryKernel(head * (queries + 2 * keys)), MemoryKernel(0))


def _get_clamps(spec: JobSpec) -> ForwardBackward:
    moe = spec.model.moe
    assert moe is not None
    rows = count_expert_rows(moe, get_micro_batch_tokens(spec), spec.train.seq_len)
    inner = rows * moe.expert_ffn_hidden_size // spec.layout.tp
    forward, backward = (tuple(MemoryKernel(size * inner) for size in sizes) for sizes in CLAMP_BYTES)
    return forward, backward


def build_embedding_kernels(spec: JobSpec) -> ModuleKernels:
    """Return the kernels of the embedding lookup and its gradient."""
    size = (
        get_micro_batch_tokens(spec) * spec.model.hidden_size * get_mixed_precision(spec.train.precision).compute_bytes
    )
    return ModuleKernels((MemoryKernel(3 * size),), (), (MemoryKernel(3 * size),))


def build_head_kernels(spec: JobSpec, *, gathers_logits: bool = False) -> ModuleKernels:
    """Return the kernels of final norm, head, and loss.

    fp32 logits are read and written several times.

    Args:
        gathers_logits: Each tp rank gathers the logits of the whole vocabulary.
    """
    model, tokens = spec.model, get_micro_batch_tokens(spec)
    e = get_mixed_precision(spec.train.precision).compute_bytes
    h, vocab = model.hidden_size, get_vocab_rows(spec)
    logits = tokens * vocab * (spec.layout.tp if gathers_logits else 1)
    product = Gemm(tokens, vocab, h, wide=True)
    cast, softmax = MemoryKernel((e + FP32_BYTES) * logits, "loss"), MemoryKernel(3 * FP32_BYTES * logits, "loss")
    return ModuleKernels(
        forward=(MemoryKernel(2 * e * tokens * h), product, cast, softmax),
        backward_input=(
            MemoryKernel(2 * FP32_BYTES * logits, "loss"),
            cast,
            product._replace(n=h, k=vocab),
            MemoryKernel(3 * e * tokens * h),
        ),
        backward_weight=(product._replace(m=vocab, n=h, k=tokens, over_rows=True),),
    )
