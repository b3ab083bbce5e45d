"""Products, passes over memory, the trainer's own layers, and its optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.model_shapes import Parameter, get_layer_parameters
from planner.facts.placements import TensorPlacement
from planner.facts.precision import GemmType
from planner.facts.presets import PRESETS
from planner.facts.spec import ModelSpec, TrainSpec
from planner.hardware.profile import EndsPoint, GemmPoint, LayerPoint, MeasuredPrecision, OptimizerPoint, StreamPoint
from workers.calibrate.timing import ActiveRanks, measure_added_seconds, measure_slowest, time_runs
from workers.trainer.model import Decoder, Strategy
from workers.trainer.optimizer import clip_gradients, gradient_square_sum, make_optimizer, update
from workers.trainer.parallel.data_parallel import NoDataParallel
from workers.trainer.parallel.matmul import WIDE, Fp8
from workers.trainer.parallel.parallelize import Held, Part
from workers.trainer.parallel.tensor_parallel import TensorParallel

SEQ_LEN = 128
DEPTH = 4  # layers in a row
ROUNDS = 20


class DeviceCases(NamedTuple):
    """What is measured on a kind of device: (m, k) of products and their types, bytes of streams, presets whose layers
    are timed in `precisions`."""

    gemm: tuple[tuple[int, int], ...]
    products: tuple[GemmType, ...]
    stream: tuple[int, ...]
    presets: tuple[str, ...]
    micro_batches: tuple[int, ...]
    precisions: tuple[MeasuredPrecision, ...]


DEVICE_CASES = {
    "cpu": DeviceCases(
        gemm=((64, 128), (256, 256), (512, 512), (1024, 1024)),
        products=("fp32", "bf16", "fp8"),
        stream=(2**10, 2**16, 2**20, 2**24),
        presets=("gpt-tiny", "gpt-mini", "llama-tiny", "llama-mini"),
        micro_batches=(1, 4),
        precisions=("fp32",),
    ),
    "cuda": DeviceCases(
        gemm=((1024, 1024), (4096, 4096), (8192, 8192), (16384, 8192)),
        products=("fp32", "bf16"),
        stream=(2**16, 2**24, 2**28, 2**30),
        presets=("gpt2", "gpt2-xl", "llama3-8b"),
        micro_batches=(1, 8, 32),
        precisions=("fp32", "bf16"),
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def measure_gemms(crew: ActiveRanks) -> Iterator[GemmPoint]:
    """(m, k) x (k, k) products."""
    for precision in DEVICE_CASES[crew.device.type].products:
        products = Fp8() if precision == "fp8" else WIDE
        for m, k in DEVICE_CASES[crew.device.type].gemm:
            a, b = (torch.randn(shape, device=crew.device).to(DTYPES[precision]) for shape in ((m, k), (k, k)))
            took = measure_slowest(partial(_only, partial(products.outputs, a, [b], [None]), crew), crew)
            if took is not None:
                yield GemmPoint(ranks=crew.ranks, precision=precision, m=m, n=k, k=k, seconds=took["s"])


def measure_streams(crew: ActiveRanks) -> Iterator[StreamPoint]:
    """x * 2 into another buffer: reads and writes."""
    for size in DEVICE_CASES[crew.device.type].stream:
        x = torch.ones(size // 8, device=crew.device)
        out = torch.empty_like(x)
        took = measure_slowest(partial(_only, partial(torch.mul, x, 2.0, out=out), crew), crew)
        if took is not None:
            yield StreamPoint(ranks=crew.ranks, num_bytes=size, seconds=took["s"])


def measure_layers(crew: ActiveRanks) -> Iterator[LayerPoint]:
    """One layer of each preset, forward and backward, at each tp degree: the mean of several, so that no cache holds
    what a step would not find there."""
    for shape in _shapes(crew):
        model, batch = shape.model, shape.micro_batch
        block = _decoder(shape, crew, layers=DEPTH)
        seq_len = SEQ_LEN // (shape.tp if shape.sequence_parallel else 1)
        x = torch.randn((batch, seq_len, model.hidden_size), device=crew.device, dtype=DTYPES[shape.precision])
        gradient = torch.ones_like(x)

        def hidden(block: Decoder = block, x: torch.Tensor = x) -> torch.Tensor:
            return block(x.detach().requires_grad_())  # type: ignore[no-any-return]

        took = measure_slowest(partial(_both_ways, hidden, block, gradient, crew), crew)
        if took is not None:
            yield LayerPoint(
                **_told(shape, crew),
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                ffn_hidden_size=model.ffn_hidden_size,
                forward_s=took["forward"] / DEPTH,
                backward_s=took["backward"] / DEPTH,
            )


def measure_ends(crew: ActiveRanks) -> Iterator[EndsPoint]:
    """Embedding, final norm, head and loss of each preset."""
    for shape in _shapes(crew):
        ends = _decoder(shape, crew, layers=0)
        tokens = torch.randint(0, shape.model.vocab_size, (shape.micro_batch, SEQ_LEN), device=crew.device)

        def loss(ends: Decoder = ends, tokens: torch.Tensor = tokens) -> torch.Tensor:
            return ends.loss_sum(ends(tokens), tokens)

        took = measure_slowest(partial(_both_ways, loss, ends, None, crew), crew)
        if took is not None:
            yield EndsPoint(
                **_told(shape, crew),
                vocab_size=shape.model.vocab_size,
                forward_s=took["forward"],
                backward_s=took["backward"],
            )


def measure_optimizer(crew: ActiveRanks) -> Iterator[OptimizerPoint]:
    """What follows backward, over the tensors of each preset."""
    for name in DEVICE_CASES[crew.device.type].presets[:2]:
        model = PRESETS[name].model
        shapes = [p.shape for p in get_layer_parameters(model)] * min(model.num_layers, 8)
        tensors = [torch.nn.Parameter(torch.randn(shape, device=crew.device)) for shape in shapes]
        part = Part({}, [_whole(tensor) for tensor in tensors], NoDataParallel(), torch.float32)
        optimizer = make_optimizer(part, TrainSpec())
        gradients = [torch.ones_like(tensor) for tensor in tensors]
        step = partial(_optimizer_step, part, optimizer, gradients)
        took = measure_slowest(partial(_beside_layers, step, crew), crew)
        if took is not None:
            numel = sum(t.numel() for t in tensors)
            yield OptimizerPoint(ranks=crew.ranks, num_parameters=numel, num_tensors=len(tensors), seconds=took["s"])


class LayerCase(NamedTuple):
    """A piece of a model as one rank of a tp group computes it."""

    precision: MeasuredPrecision
    model: ModelSpec
    tp: int
    sequence_parallel: bool
    micro_batch: int


def _shapes(crew: ActiveRanks) -> Iterator[LayerCase]:
    """Of every layer to time."""
    sizes = DEVICE_CASES[crew.device.type]
    for precision in sizes.precisions:
        for name in sizes.presets:
            model = PRESETS[name].model
            for tp in (1, *crew.sizes):
                if model.num_kv_heads % tp or model.vocab_size % tp or SEQ_LEN % tp:
                    continue
                for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                    for batch in sizes.micro_batches:
                        yield LayerCase(precision, model, tp, sequence_parallel, batch)


def _decoder(shape: LayerCase, crew: ActiveRanks, *, layers: int) -> Decoder:
    """So many layers, or none and both ends, as the trainer computes them."""
    group = crew.neighbours.get(shape.tp)
    strategy = Strategy(tp=TensorParallel(group, shape.tp, dist.get_rank() % shape.tp, shape.sequence_parallel))
    dtype, ends = DTYPES[shape.precision], layers == 0
    decoder = Decoder(shape.model, range(layers), strategy, dtype, first=ends, last=ends).to(crew.device, dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return decoder


def _told(shape: LayerCase, crew: ActiveRanks) -> dict[str, Any]:
    return {
        "ranks": crew.ranks,
        "precision": shape.precision,
        "arch": shape.model.arch,
        "hidden_size": shape.model.hidden_size,
        "tp": shape.tp,
        "sequence_parallel": shape.sequence_parallel,
        "micro_batch": shape.micro_batch,
        "seq_len": SEQ_LEN,
    }


def _whole(tensor: torch.nn.Parameter) -> Held:
    return Held(
        "", Parameter("", tuple(tensor.shape), None), TensorPlacement(None, None, None), tensor, tensor, tensor, 1
    )


def _optimizer_step(part: Part, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for held, gradient in zip(part.tensors, gradients, strict=True):
        held.summed.grad = gradient
    norm = float(gradient_square_sum(part)) ** 0.5
    clip_gradients(part, norm, 0.999 * norm)
    update(part, optimizer)


def _only(work: Callable[[], object], crew: ActiveRanks) -> dict[str, float]:
    return {"s": time_runs(work, crew)}


def _beside_layers(work: Callable[[], object], crew: ActiveRanks) -> dict[str, float]:
    return {"s": measure_added_seconds(work, build_layers(crew), ROUNDS, crew)}


def build_layers(crew: ActiveRanks) -> Callable[[], object]:
    """Forward and backward through a few layers of the smallest preset: what goes on between other work."""
    model = PRESETS[DEVICE_CASES[crew.device.type].presets[0]].model
    block = _decoder(LayerCase("fp32", model, 1, False, 1), crew, layers=DEPTH)
    x = torch.randn((1, SEQ_LEN, model.hidden_size), device=crew.device)
    gradient = torch.ones_like(x)

    def there_and_back() -> None:
        torch.autograd.backward(block(x.detach().requires_grad_()), gradient)
        block.zero_grad(set_to_none=True)

    return there_and_back


def _both_ways(
    forward: Callable[[], torch.Tensor], module: torch.nn.Module, gradient: torch.Tensor | None, crew: ActiveRanks
) -> dict[str, float]:
    """Seconds of forward, and of backward as the rest of forward and backward."""

    def step() -> None:
        torch.autograd.backward(forward(), gradient)
        module.zero_grad(set_to_none=True)

    ahead = time_runs(forward, crew)
    both = time_runs(step, crew)
    return {"forward": ahead, "backward": max(both - ahead, ahead / 10)}
