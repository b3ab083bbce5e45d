"""States the order in which a model becomes this rank's part of it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner.facts.layout import get_chunk_indices, get_num_chunks
from planner.facts.model_shapes import Parameter, ParameterUnit, get_chunk_units
from planner.facts.placements import TensorPlacement, get_expert_index, get_local_parameter, get_placement
from planner.facts.precision import FP32_BYTES, get_mixed_precision
from planner.facts.schedules import splits_backward
from planner.facts.spec import JobSpec
from planner.facts.stages import get_stage_chunks
from workers.trainer.model import Decoder, Strategy, initialise, unit_modules, unit_parameter
from workers.trainer.model.decoder import draws_at_once, full_name
from workers.trainer.parallel.context_parallel import ContextParallel
from workers.trainer.parallel.data_parallel import (
    BucketedAllReduce,
    DataParallel,
    MasterGradients,
    Together,
    make_master,
)
from workers.trainer.parallel.expert_parallel import EvenExpertParallel, ExpertParallel
from workers.trainer.parallel.matmul import WIDE, Fp8, WeightGradients
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.tensor_parallel import TensorParallel

# What ZeRO needs of torch takes most of a second to import: only a rank that shards does.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

TIED = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Held:
    """One tensor of this rank, where its parts lie, and how many ranks have the same gradient in the end.

    The model computes with `tensor`, `summed` holds its gradient, and the optimiser updates `master`: all one, but
    where fp32 weights are held apart.
    """

    name: str
    spec: Parameter
    placement: TensorPlacement
    tensor: nn.Parameter
    summed: nn.Parameter
    master: nn.Parameter
    copies: int

    @property
    def gradient(self) -> torch.Tensor:
        """The part of the gradient that lies on this rank."""
        assert self.summed.grad is not None
        return local(self.summed.grad)

    @property
    def copied_by_tp_neighbours(self) -> bool:
        """Whether some tp ranks hold the same part: key/value heads that are fewer than the ranks."""
        return self.placement.tp is not None and self.placement.tp.replicas > 1


@dataclass(frozen=True)
class Part:
    """This rank's part of the model: its chunks by index in the whole pipe, and every tensor of theirs."""

    chunks: dict[int, Decoder]
    tensors: list[Held]
    data_parallel: DataParallel
    dtype: torch.dtype

    def masters(self) -> list[nn.Parameter]:
        """What the optimiser updates."""
        return [held.master for held in self.tensors]

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Let the weights computed with be those of the masters."""
        for held in self.tensors:
            if held.master is not held.tensor:
                held.tensor.copy_(held.master)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank."""
    found: Any = tensor
    return found.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds a part."""
    return hasattr(tensor, "to_local")


def parallelize(spec: JobSpec, mesh: Mesh, device: torch.device) -> Part:
    """Meta model of each chunk -> per unit: memory, initial values, ZeRO shard -> gradient reduction -> compile."""
    built = build(spec, mesh, device)
    part = assemble(spec, mesh, built)
    if spec.train.compile:
        for block in (block for decoder in part.chunks.values() for block in decoder.blocks()):
            block.compile_layer()
    return part


@dataclass(frozen=True)
class Built:
    """Chunks by index in the whole pipe, and their FSDP2 roots."""

    chunks: dict[int, Decoder]
    roots: list[FSDPModule]


def build(spec: JobSpec, mesh: Mesh, device: torch.device, *, fill: bool = True, even: bool = False) -> Built:
    """This rank's chunks, sharded. Without `fill` they stay on meta; `even`: no router will be computed."""
    dtype, draws = compute_type(spec), draws_at_once(device)
    stage = get_stage_chunks(spec.model, spec.layout, mesh.place.pp)
    built = Built({}, [])
    for index, layers in zip(get_chunk_indices(spec.layout, mesh.place.pp), stage.chunks, strict=True):
        strategy = make_strategy(spec, mesh, EvenExpertParallel if even else ExpertParallel)
        first, last = _ends(spec, index)
        with torch.device("meta"):
            decoder = Decoder(spec.model, layers, strategy, dtype, first=first, last=last)
        # Unit by unit, so that a rank never holds more than its shards and one whole unit.
        for unit in get_chunk_units(spec.model, layers, first=first, last=last):
            if fill:
                for module in unit_modules(decoder, unit):
                    _give_memory(module, device)
                initialise(decoder, unit, spec, mesh.place, draws)
            if not get_mixed_precision(spec.train.precision).has_master_weights:
                _narrow(unit_modules(decoder, unit), dtype)
            if spec.layout.zero and unit.name != "root":
                _shard_layer(spec, mesh, unit_modules(decoder, unit)[0], device, dtype)
        if spec.layout.zero:
            built.roots.append(_shard(spec, mesh, decoder, device, dtype))
        built.chunks[index] = decoder
    return built


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """As `to_empty`, whose way through torch's reference operators imports a whole computer algebra."""

    def memory_of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            setattr(inner, name, nn.Parameter(memory_of(parameter)))
        for name, buffer in list(inner.named_buffers(recurse=False)):
            setattr(inner, name, memory_of(buffer))


def _narrow(modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Hold weights as they are computed with, for nothing holds them in more."""
    for parameter in (p for module in modules for p in module.parameters()):
        parameter.data = parameter.data.to(dtype)


def assemble(spec: JobSpec, mesh: Mesh, built: Built) -> Part:
    """What training needs of built chunks: every tensor, and how gradients become one."""
    stage = get_stage_chunks(spec.model, spec.layout, mesh.place.pp)
    tensors: list[Held] = []
    for (index, decoder), layers in zip(built.chunks.items(), stage.chunks, strict=True):
        first, last = _ends(spec, index)
        units = get_chunk_units(spec.model, layers, first=first, last=last)
        tensors += [_held(spec, decoder, unit, p) for unit in units for p in unit.parameters]
    apart = {held.tensor: held.master for held in tensors if held.summed is not held.tensor}
    kinds: list[DataParallel] = [MasterGradients(apart, splits=splits_backward(spec.layout))] if apart else []
    kinds += _zero(spec, built) if built.roots else _plain(spec, mesh, built, tensors)
    return Part(built.chunks, tensors, Together(kinds), compute_type(spec))


def compute_type(spec: JobSpec) -> torch.dtype:
    return torch.float32 if spec.train.precision == "fp32" else torch.bfloat16


def _ends(spec: JobSpec, chunk: int) -> tuple[bool, bool]:
    """Whether a chunk is the first and the last of the pipe."""
    return chunk == 0, chunk == get_num_chunks(spec.layout) - 1


def make_strategy(spec: JobSpec, mesh: Mesh, experts: type[ExpertParallel] = ExpertParallel) -> Strategy:
    """How the blocks of one chunk are computed."""
    layout, moe = spec.layout, spec.model.moe
    # Each tp rank adds the same load-balancing loss; it is the mean over sequences.
    scale = moe.balance_loss / (spec.train.global_batch * layout.tp) if moe else 0.0
    return Strategy(
        tp=TensorParallel(mesh.tp, layout.tp, mesh.place.tp, layout.sequence_parallel),
        cp=ContextParallel(mesh.cp, layout.cp, mesh.place.cp, layout.cp_method),
        ep=experts(mesh.ep, layout.ep, get_expert_index(layout, mesh.place)),
        recompute=layout.recompute,
        attention=spec.train.attention,
        regather=layout.regather,
        weight_gradients=WeightGradients() if splits_backward(spec.layout) else None,
        balance_scale=scale,
        products=Fp8() if get_mixed_precision(spec.train.precision).gemm == "fp8" else WIDE,
    )


def _zero(spec: JobSpec, built: Built) -> list[DataParallel]:
    from workers.trainer.parallel.zero import Zero

    return [Zero(built.roots, spec.layout.zero, keeps=spec.layout.keep_gathered)]


def _shard_layer(spec: JobSpec, mesh: Mesh, layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """A layer is a unit, and so are its experts where ep divides them: fewer ranks hold the same ones."""
    if mesh.expert_shards is not None:
        for experts in _experts(layer):
            _shard(spec, mesh, experts, device, dtype, experts=True)
    _shard(spec, mesh, layer, device, dtype)


def _shard(
    spec: JobSpec, mesh: Mesh, module: nn.Module, device: torch.device, dtype: torch.dtype, *, experts: bool = False
) -> FSDPModule:
    from workers.trainer.parallel.zero import shard

    alone = spec.layout.ep > 1 and mesh.expert_shards is None  # nobody else holds this rank's experts
    besides = {p for found in _experts(module) for p in found.parameters()} if alone else set()
    shards, copies = (mesh.expert_shards, None) if experts else (mesh.shards, mesh.copies)
    assert shards is not None
    reduced = (
        torch.float32 if get_mixed_precision(spec.train.precision).gradient_bytes == FP32_BYTES else torch.bfloat16
    )
    frees = spec.layout.zero == 3 and not spec.layout.keep_gathered
    return shard(module, shards, copies, device, frees=frees, compute=dtype, reduced=reduced, besides=besides)


def _experts(module: nn.Module) -> list[nn.Module]:
    return [found for name, found in module.named_modules() if name.endswith("moe.experts")]


def _plain(spec: JobSpec, mesh: Mesh, built: Built, tensors: list[Held]) -> list[DataParallel]:
    if mesh.replicas is None:
        return []
    holders = {held.tensor: held.summed for held in tensors}
    train, element = spec.train, get_mixed_precision(spec.train.precision).gradient_bytes
    decoders = list(built.chunks.values())
    divided = {p for d in decoders for e in _experts(d) for p in e.parameters()} if spec.layout.ep > 1 else set()
    # Modules are registered in the order of a forward, and backward finishes them from the last.
    finished = [p for decoder in reversed(decoders) for p in reversed(list(decoder.parameters()))]
    kinds: list[DataParallel] = []
    for experts, group in ((False, mesh.replicas), (True, mesh.expert_replicas)):
        ordered = {p: holders[p] for p in finished if (p in divided) == experts}
        if ordered and group is not None:
            kinds.append(
                BucketedAllReduce(
                    ordered,
                    group,
                    train.micro_batches,
                    element,
                    overlap=train.overlap,
                    splits=splits_backward(spec.layout),
                )
            )
    return kinds


def _held(spec: JobSpec, decoder: Decoder, unit: ParameterUnit, parameter: Parameter) -> Held:
    tensor, dtype, mix = (
        unit_parameter(decoder, unit, parameter),
        compute_type(spec),
        get_mixed_precision(spec.train.precision),
    )
    # The model sizes its tensors by itself: a placement that is wrong ends here.
    assert tensor.shape == get_local_parameter(spec.model, spec.layout, parameter).shape, full_name(unit, parameter)
    # What FSDP2 shards is fp32 at rest.
    master = make_master(tensor, dtype) if mix.has_master_weights and not is_sharded(tensor) else tensor
    summed = master if mix.gradient_bytes == FP32_BYTES else tensor
    lies = get_placement(spec.model, spec.layout, parameter)
    # Ranks of the stages that hold it, over the parts that they hold.
    copies = spec.layout.replica_ranks * spec.layout.tp // lies.num_shards * (2 if is_tied(spec, parameter) else 1)
    return Held(full_name(unit, parameter), parameter, lies, tensor, summed, master, copies)


def is_tied(spec: JobSpec, parameter: Parameter) -> bool:
    """Whether a table is one of two copies: the ends of a pipe each hold theirs."""
    return spec.model.tied_embeddings and spec.layout.pp > 1 and parameter.name in TIED
