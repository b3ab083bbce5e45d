"""Products, passes over memory, the trainer's own layers, and its optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from planner.models import layer_parameters
from planner.presets import PRESETS
from planner.profile import EndsPoint, GemmPoint, LayerPoint, MeasuredPrecision, OptimizerPoint, StreamPoint
from planner.spec import ModelSpec
from workers.calibrate.clock import seconds, together
from workers.trainer.model import Block, Norm, Strategy, Table
from workers.trainer.optimizer import square_sum
from workers.trainer.tensor_parallel import TensorParallel

SEQ_LEN = 128
DEGREES = (1, 2, 4, 8)


class Sizes(NamedTuple):
    """What is measured on a kind of device: (m, k) of products, bytes of streams, presets whose layers are timed."""

    gemm: tuple[tuple[int, int], ...]
    stream: tuple[int, ...]
    presets: tuple[str, ...]
    micro_batches: tuple[int, ...]
    precisions: tuple[MeasuredPrecision, ...]


SIZES = {
    "cpu": Sizes(
        gemm=((64, 128), (256, 256), (512, 512), (1024, 1024)),
        stream=(2**10, 2**16, 2**20, 2**24),
        presets=("gpt-tiny", "gpt-mini", "llama-tiny", "llama-mini"),
        micro_batches=(1, 2, 4, 8),
        precisions=("fp32",),
    ),
    "cuda": Sizes(
        gemm=((1024, 1024), (4096, 4096), (8192, 8192), (16384, 8192)),
        stream=(2**16, 2**24, 2**28, 2**30),
        presets=("gpt2", "gpt2-xl", "llama3-8b"),
        micro_batches=(1, 8, 32),
        precisions=("fp32", "bf16"),
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gemm_points(device: torch.device, ranks: int, window_s: float) -> Iterator[GemmPoint]:
    """(m, k) x (k, k) products."""
    for precision in SIZES[device.type].precisions:
        for m, k in SIZES[device.type].gemm:
            a, b = (torch.randn(shape, device=device).to(DTYPES[precision]) for shape in ((m, k), (k, k)))
            took = together(partial(_only, partial(torch.mm, a, b), device, window_s), ranks)
            if took is not None:
                yield GemmPoint(ranks=ranks, precision=precision, m=m, n=k, k=k, seconds=took["s"])


def stream_points(device: torch.device, ranks: int, window_s: float) -> Iterator[StreamPoint]:
    """x * 2 into another buffer: reads and writes."""
    for size in SIZES[device.type].stream:
        x = torch.ones(size // 8, device=device)
        out = torch.empty_like(x)
        took = together(partial(_only, partial(torch.mul, x, 2.0, out=out), device, window_s), ranks)
        if took is not None:
            yield StreamPoint(ranks=ranks, num_bytes=size, seconds=took["s"])


def layer_points(device: torch.device, ranks: int, window_s: float) -> Iterator[LayerPoint]:
    """One layer of each preset, forward and backward, with the shapes of each tp degree."""
    for precision, model, tp, batch in _shapes(device, ranks):
        block = Block(model, Strategy(tp=TensorParallel(None, tp))).to(device, DTYPES[precision])
        _fill(block)
        shape = (batch, SEQ_LEN, model.hidden_size)
        x = torch.randn(shape, device=device, dtype=DTYPES[precision], requires_grad=True)
        took = together(partial(_both_ways, partial(block, x), block, device, window_s), ranks)
        if took is not None:
            yield LayerPoint(
                ranks=ranks,
                precision=precision,
                arch=model.arch,
                hidden_size=model.hidden_size,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                ffn_hidden_size=model.ffn_hidden_size,
                tp=tp,
                micro_batch=batch,
                seq_len=SEQ_LEN,
                forward_s=took["forward"],
                backward_s=took["backward"],
            )


def ends_points(device: torch.device, ranks: int, window_s: float) -> Iterator[EndsPoint]:
    """Embedding, final norm, head and loss of each preset."""
    for precision, model, tp, batch in _shapes(device, ranks):
        strategy = Strategy()
        table = Table(model.vocab_size // tp, model.hidden_size, strategy)
        norm = Norm(model.hidden_size, model.arch == "gpt", strategy)
        ends = torch.nn.ModuleDict({"table": table, "norm": norm}).to(device, DTYPES[precision])
        _fill(ends)
        tokens = torch.randint(0, model.vocab_size // tp, (batch, SEQ_LEN), device=device)
        work = partial(_ends, table, norm, tokens, DTYPES[precision])
        took = together(partial(_both_ways, work, ends, device, window_s), ranks)
        if took is not None:
            yield EndsPoint(
                ranks=ranks,
                precision=precision,
                arch=model.arch,
                hidden_size=model.hidden_size,
                vocab_size=model.vocab_size,
                tp=tp,
                micro_batch=batch,
                seq_len=SEQ_LEN,
                forward_s=took["forward"],
                backward_s=took["backward"],
            )


def optimizer_points(device: torch.device, ranks: int, window_s: float) -> Iterator[OptimizerPoint]:
    """What follows backward, over the tensors of each preset."""
    for name in SIZES[device.type].presets[:2]:
        model = PRESETS[name].model
        shapes = [p.shape for p in layer_parameters(model)] * min(model.num_layers, 8)
        tensors = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=True)

        took = together(partial(_only, partial(_optimizer_step, tensors, optimizer), device, window_s), ranks)
        if took is not None:
            numel = sum(t.numel() for t in tensors)
            yield OptimizerPoint(ranks=ranks, num_parameters=numel, num_tensors=len(tensors), seconds=took["s"])


def _shapes(device: torch.device, ranks: int) -> Iterator[tuple[MeasuredPrecision, ModelSpec, int, int]]:
    """(precision, model, tp, micro-batch) of every layer to time."""
    sizes = SIZES[device.type]
    for precision in sizes.precisions:
        for name in sizes.presets:
            model = PRESETS[name].model
            for tp in DEGREES:
                if tp > ranks or model.num_kv_heads % tp or model.vocab_size % tp:
                    continue
                for batch in sizes.micro_batches:
                    yield precision, model, tp, batch


def _ends(table: Table, norm: Norm, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    parallel, weight = TensorParallel(None), table.weight.to(dtype)
    logits = torch.nn.functional.linear(norm(parallel.embed(tokens, weight)), weight)
    return parallel.loss_sum(logits, tokens)


def _optimizer_step(tensors: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    norm = sum(float(square_sum(gradient.flatten())) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(1.0 / max(1.0, norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _only(work: Callable[[], object], device: torch.device, window_s: float) -> dict[str, float]:
    return {"s": seconds(work, device, window_s)}


def _both_ways(
    forward: Callable[[], torch.Tensor], module: torch.nn.Module, device: torch.device, window_s: float
) -> dict[str, float]:
    """Seconds of forward, and of backward as the rest of forward and backward."""

    def step() -> None:
        torch.autograd.backward(forward().float().sum())
        module.zero_grad(set_to_none=True)

    ahead = seconds(forward, device, window_s)
    both = seconds(step, device, window_s)
    return {"forward": ahead, "backward": max(both - ahead, ahead / 10)}


def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
