"""Build this rank's shard of a model, and apply each parallelism in order."""

from __future__ import annotations

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
from workers.trainer.model import Decoder, Strategy, get_unit_parameter, init_weights, list_unit_modules
from workers.trainer.model.decoder import get_full_name, get_num_init_threads
from workers.trainer.parallel.context_parallel import ContextParallel
from workers.trainer.parallel.data_parallel import (
    BucketedAllReduce,
    CombinedDataParallel,
    DataParallel,
    MasterGradients,
    make_master,
)
from workers.trainer.parallel.expert_parallel import EvenExpertParallel, ExpertParallel
from workers.trainer.parallel.matmul import UNQUANTIZED, Fp8Matmuls, WeightGradients
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.tensor_parallel import TensorParallel

# FSDP2 takes almost a second to import, so only ranks that use ZeRO import it.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

TIED = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class ShardedParameter:
    """Store a parameter of this rank and its placement.

    The model computes with `weight`, gradients accumulate in `gradient_holder`, and the optimizer updates `master`.
    They are the same tensor unless fp32 weights are separate. `num_replicas` ranks have the same final gradient.
    """

    name: str
    spec: Parameter
    placement: TensorPlacement
    weight: nn.Parameter
    gradient_holder: nn.Parameter
    master: nn.Parameter
    num_replicas: int

    @property
    def gradient(self) -> torch.Tensor:
        """Return the local shard of the gradient."""
        assert self.gradient_holder.grad is not None
        return get_local(self.gradient_holder.grad)

    @property
    def is_replicated_over_tp(self) -> bool:
        """Return whether some tp ranks hold the same shard, because there are fewer key/value heads than ranks."""
        return self.placement.tp is not None and self.placement.tp.replicas > 1


@dataclass(frozen=True)
class ModelShard:
    """Store this rank's chunks by global chunk index, and all their parameters."""

    chunks: dict[int, Decoder]
    parameters: list[ShardedParameter]
    data_parallel: DataParallel
    dtype: torch.dtype

    def get_masters(self) -> list[nn.Parameter]:
        """Return the tensors that the optimizer updates."""
        return [held.master for held in self.parameters]

    @torch.no_grad()
    def copy_masters_to_weights(self) -> None:
        """Copy fp32 masters to the weights that the model computes with."""
        for held in self.parameters:
            if held.master is not held.weight:
                held.weight.copy_(held.master)


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor."""
    found: Any = tensor
    return found.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def parallelize(spec: JobSpec, mesh: Mesh, device: torch.device) -> ModelShard:
    """Build the chunks, add gradient reduction, and compile."""
    built = build_chunks(spec, mesh, device)
    part = assemble_shard(spec, mesh, built)
    if spec.train.compile:
        for block in (block for decoder in part.chunks.values() for block in decoder.blocks()):
            block.compile_layer()
    return part


@dataclass(frozen=True)
class BuiltChunks:
    """Store chunks by global chunk index, and their FSDP2 roots."""

    chunks: dict[int, Decoder]
    roots: list[FSDPModule]


def build_chunks(
    spec: JobSpec, mesh: Mesh, device: torch.device, *, init: bool = True, even_routing: bool = False
) -> BuiltChunks:
    """Build and shard this rank's chunks.

    Without `init`, weights stay on the meta device. `even_routing` replaces routing in dry runs.
    """
    dtype, num_threads = get_compute_dtype(spec), get_num_init_threads(device)
    stage = get_stage_chunks(spec.model, spec.layout, mesh.coordinates.pp)
    built = BuiltChunks({}, [])
    for index, layers in zip(get_chunk_indices(spec.layout, mesh.coordinates.pp), stage.chunks, strict=True):
        strategy = build_strategy(spec, mesh, EvenExpertParallel if even_routing else ExpertParallel)
        first, last = _get_ends(spec, index)
        with torch.device("meta"):
            decoder = Decoder(spec.model, layers, strategy, dtype, first=first, last=last)
        # Shard unit by unit, so that a rank holds only its shards and one whole unit.
        for unit in get_chunk_units(spec.model, layers, first=first, last=last):
            if init:
                for module in list_unit_modules(decoder, unit):
                    _materialize(module, device)
                init_weights(decoder, unit, spec, mesh.coordinates, num_threads)
            if not get_mixed_precision(spec.train.precision).has_master_weights:
                for parameter in (p for module in list_unit_modules(decoder, unit) for p in module.parameters()):
                    parameter.data = parameter.data.to(dtype)
            if spec.layout.zero and unit.name != "root":
                layer = list_unit_modules(decoder, unit)[0]  # one FSDP2 unit, and its experts another if ep shards them
                for experts in _list_experts(layer) if mesh.expert_shards is not None else []:
                    _shard(spec, mesh, experts, device, dtype, experts=True)
                _shard(spec, mesh, layer, device, dtype)
        if spec.layout.zero:
            built.roots.append(_shard(spec, mesh, decoder, device, dtype))
        built.chunks[index] = decoder
    return built


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate parameters and buffers. `Module.to_empty` would import sympy."""

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            setattr(inner, name, nn.Parameter(allocate(parameter)))
        for name, buffer in list(inner.named_buffers(recurse=False)):
            setattr(inner, name, allocate(buffer))


def assemble_shard(spec: JobSpec, mesh: Mesh, built: BuiltChunks) -> ModelShard:
    """Collect the parameters of built chunks, and select the gradient reduction."""
    stage = get_stage_chunks(spec.model, spec.layout, mesh.coordinates.pp)
    tensors: list[ShardedParameter] = []
    for (index, decoder), layers in zip(built.chunks.items(), stage.chunks, strict=True):
        first, last = _get_ends(spec, index)
        units = get_chunk_units(spec.model, layers, first=first, last=last)
        tensors += [_make_parameter(spec, decoder, unit, p) for unit in units for p in unit.parameters]
    masters = {held.weight: held.master for held in tensors if held.gradient_holder is not held.weight}
    reducers: list[DataParallel] = (
        [MasterGradients(masters, splits_backward=splits_backward(spec.layout))] if masters else []
    )
    if built.roots:
        from workers.trainer.parallel.zero import ZeroDataParallel

        reducers.append(ZeroDataParallel(built.roots, spec.layout.zero, keeps_gathered=spec.layout.keep_gathered))
    else:
        reducers += _make_all_reduce(spec, mesh, built, tensors)
    return ModelShard(built.chunks, tensors, CombinedDataParallel(reducers), get_compute_dtype(spec))


def get_compute_dtype(spec: JobSpec) -> torch.dtype:
    return torch.float32 if spec.train.precision == "fp32" else torch.bfloat16


def _get_ends(spec: JobSpec, chunk: int) -> tuple[bool, bool]:
    """Return whether a chunk is the first and the last of the pipeline."""
    return chunk == 0, chunk == get_num_chunks(spec.layout) - 1


def build_strategy(spec: JobSpec, mesh: Mesh, experts: type[ExpertParallel] = ExpertParallel) -> Strategy:
    """Return the strategy of the blocks of one chunk."""
    layout, moe = spec.layout, spec.model.moe
    # Each tp rank adds the same load-balancing loss, which is the mean over sequences.
    scale = moe.balance_loss / (spec.train.global_batch * layout.tp) if moe else 0.0
    return Strategy(
        tp=TensorParallel(mesh.tp, layout.tp, mesh.coordinates.tp, layout.sequence_parallel),
        cp=ContextParallel(mesh.cp, layout.cp, mesh.coordinates.cp, layout.cp_method),
        ep=experts(mesh.ep, layout.ep, get_expert_index(layout, mesh.coordinates)),
        recompute=layout.recompute,
        attention=spec.train.attention,
        regather=layout.regather,
        weight_gradients=WeightGradients() if splits_backward(spec.layout) else None,
        balance_scale=scale,
        matmuls=Fp8Matmuls() if get_mixed_precision(spec.train.precision).gemm == "fp8" else UNQUANTIZED,
    )


def _shard(
    spec: JobSpec, mesh: Mesh, module: nn.Module, device: torch.device, dtype: torch.dtype, *, experts: bool = False
) -> FSDPModule:
    from workers.trainer.parallel.zero import shard_module

    unshared = spec.layout.ep > 1 and mesh.expert_shards is None  # No other rank has these experts.
    ignored = {p for found in _list_experts(module) for p in found.parameters()} if unshared else set()
    shards, copies = (mesh.expert_shards, None) if experts else (mesh.shards, mesh.hsdp_replicas)
    assert shards is not None
    is_fp32 = get_mixed_precision(spec.train.precision).gradient_bytes == FP32_BYTES
    reduced = torch.float32 if is_fp32 else torch.bfloat16
    frees = spec.layout.zero == 3 and not spec.layout.keep_gathered
    return shard_module(module, shards, copies, device, frees=frees, compute=dtype, reduced=reduced, ignored=ignored)


def _list_experts(module: nn.Module) -> list[nn.Module]:
    return [found for name, found in module.named_modules() if name.endswith("moe.experts")]


def _make_all_reduce(
    spec: JobSpec, mesh: Mesh, built: BuiltChunks, tensors: list[ShardedParameter]
) -> list[DataParallel]:
    if mesh.replicas is None:
        return []
    holders = {held.weight: held.gradient_holder for held in tensors}
    train, element = spec.train, get_mixed_precision(spec.train.precision).gradient_bytes
    decoders = list(built.chunks.values())
    divided = {p for d in decoders for e in _list_experts(d) for p in e.parameters()} if spec.layout.ep > 1 else set()
    # Modules are registered in forward order, and backward finishes in reverse order.
    finished = [p for decoder in reversed(decoders) for p in reversed(list(decoder.parameters()))]
    reducers: list[DataParallel] = []
    for experts, group in ((False, mesh.replicas), (True, mesh.expert_replicas)):
        ordered = {p: holders[p] for p in finished if (p in divided) == experts}
        if ordered and group is not None:
            reducers.append(
                BucketedAllReduce(
                    ordered,
                    group,
                    train.micro_batches,
                    element,
                    overlap=train.overlap,
                    splits_backward=splits_backward(spec.layout),
                )
            )
    return reducers


def _make_parameter(spec: JobSpec, decoder: Decoder, unit: ParameterUnit, parameter: Parameter) -> ShardedParameter:
    tensor, mix = get_unit_parameter(decoder, unit, parameter), get_mixed_precision(spec.train.precision)
    # The model computes its shapes independently, so a wrong placement fails here.
    assert tensor.shape == get_local_parameter(spec.model, spec.layout, parameter).shape, get_full_name(unit, parameter)
    # FSDP2 keeps its shards in fp32.
    master = (
        make_master(tensor, get_compute_dtype(spec)) if mix.has_master_weights and not is_sharded(tensor) else tensor
    )
    summed = master if mix.gradient_bytes == FP32_BYTES else tensor
    place = get_placement(spec.model, spec.layout, parameter)
    # ranks of the stages with this parameter, divided by the number of different shards
    copies = spec.layout.replica_ranks * spec.layout.tp // place.num_shards * (2 if is_tied(spec, parameter) else 1)
    return ShardedParameter(get_full_name(unit, parameter), parameter, place, tensor, summed, master, copies)


def is_tied(spec: JobSpec, parameter: Parameter) -> bool:
    """Return whether a parameter is a tied embedding with a replica on another stage."""
    return spec.model.tied_embeddings and spec.layout.pp > 1 and parameter.name in TIED
