"""States the order in which a model becomes this rank's part of it, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.layout import stage_of
from planner.models import Unit, stage_units
from planner.spec import JobSpec
from planner.traffic import gradient_order
from workers.trainer.data_parallel import BucketedAllReduce, DataParallel, NoDataParallel, Zero, shard
from workers.trainer.mesh import Mesh
from workers.trainer.model import Decoder, initialise, unit_modules, unit_parameter
from workers.trainer.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Part:
    """This rank's part of the model. `replicated` marks the parameters that tp copies instead of dividing."""

    decoder: Decoder
    units: list[Unit]
    tp: TensorParallel
    data_parallel: DataParallel
    dtype: torch.dtype
    replicated: list[nn.Parameter]
    tied: nn.Parameter | None  # the embedding table, or the head's copy of it, when pp > 1 ties two stages


def parallelize(spec: JobSpec, mesh: Mesh, device: torch.device) -> Part:
    """Meta model of the stage -> per unit: memory, initial values, ZeRO shard -> gradient reduction."""
    layout, model = spec.layout, spec.model
    dtype = torch.bfloat16 if spec.train.precision == "bf16" else torch.float32
    tp = TensorParallel(mesh.tp, layout.tp, mesh.place.tp, layout.sequence_parallel)
    (layers,) = stage_of(model, layout, mesh.place.pp).chunks
    units = stage_units(model, layers, first=mesh.is_first, last=mesh.is_last)

    with torch.device("meta"):
        decoder = Decoder(model, layers, tp, dtype, first=mesh.is_first, last=mesh.is_last)
    # Unit by unit, so that a rank never holds more than its shards and one whole unit.
    for unit in units:
        for module in unit_modules(decoder, unit):
            module.to_empty(device=device)
        initialise(decoder, unit, model, tp, spec.train.seed)
        if layout.zero and mesh.dp is not None and unit.name != "root":
            shard(unit_modules(decoder, unit)[0], mesh.dp, device, layout.zero, dtype)

    data_parallel: DataParallel = NoDataParallel()
    if layout.zero and mesh.dp is not None:
        root: FSDPModule = shard(decoder, mesh.dp, device, layout.zero, dtype)
        data_parallel = Zero(root, layout.zero)
    elif mesh.dp is not None:
        ordered = [unit_parameter(decoder, unit, p) for unit, p in gradient_order(units)]
        data_parallel = BucketedAllReduce(ordered, mesh.dp)

    parameters = [(p, unit_parameter(decoder, unit, p)) for unit in units for p in unit.parameters]
    tied_names = ("embedding.weight", "head.weight")
    ties = mesh.embedding is not None and model.tied_embeddings
    return Part(
        decoder=decoder,
        units=units,
        tp=tp,
        data_parallel=data_parallel,
        dtype=dtype,
        replicated=[tensor for p, tensor in parameters if p.tp_dim is None],
        tied=next((tensor for p, tensor in parameters if p.name in tied_names), None) if ties else None,
    )
