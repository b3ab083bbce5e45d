"""Loading a checkpoint into any layout of the same model.

What a checkpoint's `.metadata` says of its files: which part of which tensor lies where.

It may be another host's word. Nothing of it is run, and it leads to no file but the checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from contracts.safe_unpickle import MAX_BYTES
from planner.facts.layout import Coordinates
from planner.facts.model_shapes import get_chunk_units
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.validation import format_count
from workers.checkpoint import folder
from workers.checkpoint import manifest as manifests
from workers.checkpoint.coordination import on_every_rank, words_of
from workers.checkpoint.folder import Checkpoint
from workers.checkpoint.manifest import Files, Manifest, read_at_most
from workers.checkpoint.state import MOMENTS, BoxLoadPlanner, State, copy_tied, model_state, optimizer_state, set_steps
from workers.checkpoint.tensor_checksums import sums_of
from workers.torch_private.checkpoints import metadata_of
from workers.trainer.errors import UserError
from workers.trainer.model.decoder import full_name
from workers.trainer.parallel.parallelize import Part

SHAPELESS = {"preset", "moe"}
OF_THE_CURVE = (
    *("seed", "global_batch", "seq_len", "data", "tokenizer", "column", "sampling", "document_end"),
    *("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "precision", "steps"),
)
OF_ROUTING = ("experts_per_token", "balance_loss", "capacity_factor")


class Found(NamedTuple):
    """A checkpoint that is whole, with what it says of itself."""

    checkpoint: Checkpoint
    manifest: Manifest
    metadata: Metadata


def restore(
    spec: JobSpec,
    place: Coordinates,
    part: Part,
    optimizer: torch.optim.Optimizer,
    found: list[Checkpoint],
    group: dist.ProcessGroup | None,
    say: Callable[[str], None],
    *,
    least_left: int = 1,
) -> int:
    """Fill weights and optimiser from the first of `found` that is whole. Gives the steps it has done.

    Raises:
        UserError: when none is whole, or it holds another model, or leaves fewer than `least_left` steps to do.
    """
    whole = first_whole(found, group, say)
    checkpoint, manifest, _ = whole
    differs = model_difference(spec.model, manifest.spec.model)
    if differs:
        raise UserError(f"The checkpoint of `train.resume` has a different model: {differs}.")
    if manifest.step + least_left > spec.train.steps:
        text = f"`train.steps` is {spec.train.steps}, but the checkpoint already has {manifest.step} steps."
        raise UserError(f"{text} Increase `train.steps`.")
    state = model_state(spec, place, part) | optimizer_state(spec, place, part, optimizer)
    read(state, whole)
    set_steps(part, optimizer, manifest.step)
    copy_tied(spec, part, optimizer)
    part.follow_masters()
    _must_be_saved(state, spec, whole, group)
    torch.set_rng_state(_rng_state(manifest))
    left = "" if manifest.step < spec.train.steps else ", no steps left"
    moved = _moved(spec, manifest.spec, manifest.step)
    say(f"resumed from {checkpoint.path.name}: {manifest.step} steps done{left}{moved}")
    return manifest.step


def _must_be_saved(state: State, spec: JobSpec, whole: Found, group: dist.ProcessGroup | None) -> None:
    """Raises UserError on all ranks where the ranks hold together what the checkpoint's did not."""
    saved = whole.manifest.sums
    now, then = (get_mixed_precision(asked.train.precision) for asked in (spec, whole.manifest.spec))
    if not saved or (now.sharded_bytes, now.moment_bytes) != (then.sharded_bytes, then.moment_bytes):
        return  # written before there were any, or held in other types
    found = sums_of(state, spec.model, group)
    others = [name for name, told in found.items() if saved.get(name) != told]
    if others:
        told = f"{others[0]} and {len(others) - 1} more differ" if others[1:] else f"{others[0]} differs"
        raise UserError(f"`train.resume`: {told} from checkpoint {whole.checkpoint.path.name} after loading.")


def read(state: State, found: Found) -> None:
    """Fill the boxes of a state; every rank reads its own, nothing is sent.

    Raises:
        UserError: when a file cannot be read.
    """
    reader = Reader(found.checkpoint.path, found.metadata)
    try:
        with torch.no_grad():
            dcp_load(dict(state), storage_reader=reader, planner=BoxLoadPlanner(), no_dist=True)
    except (CheckpointException, OSError) as error:
        raise UserError(f"Cannot read checkpoint {found.checkpoint.path.name}: {words_of(error)}") from None


def first_whole(found: list[Checkpoint], group: dist.ProcessGroup | None, say: Callable[[str], None]) -> Found:
    """The first of `found` whose files are as they were written; the ranks share the reading.

    Raises:
        UserError: naming what is wrong with each.
    """
    problems = []
    for checkpoint in found:
        problem = _looked_at(checkpoint, group)
        if isinstance(problem, Found):
            return problem
        problems.append(f"{checkpoint.path.name}: {problem}")
        say(f"checkpoint {checkpoint.path.name} is damaged: {problem}. Trying the previous checkpoint.")
    raise UserError(f"`train.resume` has no undamaged checkpoint. {'; '.join(problems)}")


def model_difference(wanted: ModelSpec, held: ModelSpec) -> str:
    """How two models' shapes differ, in words; empty when they do not."""
    ours, theirs = ({**m.model_dump(exclude=SHAPELESS), "head_dim": m.head_size} for m in (wanted, held))
    if wanted.moe and held.moe:
        keys = ("num_experts", "expert_ffn_hidden_size", "shared_experts", "dense_layers", "router_bias")
        ours |= {f"moe.{key}": getattr(wanted.moe, key) for key in keys}
        theirs |= {f"moe.{key}": getattr(held.moe, key) for key in keys}
    elif wanted.moe or held.moe:
        ours["moe"], theirs["moe"] = bool(wanted.moe), bool(held.moe)
    return ", ".join(
        f"{key} is {theirs[key]} in the checkpoint and {value} in the job"
        for key, value in ours.items()
        if theirs[key] != value
    )


def _looked_at(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> Found | str:
    """What it holds, or what is wrong with it on some rank. Ranks that see the same share its files, for each host may
    have its own; what describes these each reads by itself."""
    rank = 0 if group is None else group.rank()
    path, found = checkpoint.path, list[Found]()  # here: among ranks it does not travel

    def identity() -> tuple[int, int]:
        told = (path / manifests.MANIFEST).stat()
        return told.st_ino, told.st_mtime_ns

    def damage() -> str | None:
        files = manifests.read_manifest(path).files
        return folder.damage(path, dict(sorted(files.items())[same.index(rank) :: len(same)]))

    def look() -> None:
        manifest = manifests.read_manifest(path)
        _rng_state(manifest)
        found.append(Found(checkpoint, manifest, read_metadata(path, manifest)))

    try:
        seen = on_every_rank(identity, group)
        same = [other for other, told in enumerate(seen) if told == seen[rank]]
        problem = next((problem for problem in on_every_rank(damage, group) if problem), None)
        if problem is None:
            on_every_rank(look, group)
    except UserError as error:
        return str(error)
    return found[0] if problem is None else problem


def _rng_state(manifest: Manifest) -> torch.Tensor:
    """Raises UserError where torch would not take it."""
    state = torch.tensor(manifest.rng, dtype=torch.uint8)
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        raise UserError(f"{manifests.MANIFEST}: the random generator state is invalid") from None
    return state


def _moved(spec: JobSpec, before: JobSpec, done: int) -> str:
    """What makes the loss curve differ from the one before, in words; `done`: steps before."""
    differing = [(name, getattr(before.train, name), getattr(spec.train, name)) for name in OF_THE_CURVE]
    if spec.model.moe and before.model.moe:
        differing += [(f"moe.{n}", getattr(before.model.moe, n), getattr(spec.model.moe, n)) for n in OF_ROUTING]
    changed = [f"{name} changed from {then} to {now}" for name, then, now in differing if then != now]
    changed += _of_the_epoch(spec, before, done)
    layout = "" if before.layout == spec.layout else ", with a different layout"
    return layout + (f" ({'; '.join(changed)})" if changed else "")


def _of_the_epoch(spec: JobSpec, before: JobSpec, done: int) -> list[str]:
    """Sequences are numbered by steps of the global batch as it is now."""
    then, now = before.train, spec.train
    if now.sampling != "epochs" or then.sampling != "epochs" or then.global_batch == now.global_batch:
        return []
    apart = format_count(done * abs(now.global_batch - then.global_batch), "sequence")
    left = "skipped" if now.global_batch > then.global_batch else "repeated"
    return [f"data continues at sequence {done} x {now.global_batch}: {apart} of the epoch order {left}"]


METADATA = ".metadata"


class Reader(FileSystemReader):
    """Torch's, which would unpickle `.metadata`, and `__0.metadata` where that fails."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(checkpoint: Path, manifest: Manifest) -> Metadata:
    """
    Raises:
        UserError: it cannot be read, holds what is not read, or does not fit the checkpoint's files and model.
    """
    try:
        metadata = metadata_of(read_at_most(checkpoint / METADATA, MAX_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {METADATA}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{METADATA} is refused: {error}") from None
    problem = _lost(metadata, manifest.files) or _scattered(metadata) or _missing(metadata, manifest.spec.model)
    if problem:
        raise UserError(f"{METADATA} is wrong: {problem}")
    return metadata


def _lost(metadata: Metadata, files: Files) -> str:
    """What lies elsewhere than in the checkpoint's files."""
    for index, info in metadata.storage_data.items():
        if info.relative_path not in files:
            return (
                f"{index.fqn[:100]!r} is stored in {info.relative_path[:100]!r}, which is not a file of the checkpoint"
            )
        end, (size, _) = info.offset + info.length, files[info.relative_path]
        if end > size:
            return f"{index.fqn[:100]!r} ends at byte {end:,} of {info.relative_path}, which has {size:,}"
    return ""


def _scattered(metadata: Metadata) -> str:
    """Parts that are none of their tensor, or lie nowhere."""
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # no other is made
        for chunk in tensor.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
                offset + size > whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            ):
                return f"{name[:100]!r} of shape {list(tensor.size)} has a shard outside the tensor"
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                return f"{name[:100]!r} has a shard at offset {list(chunk.offsets)} that no file stores"
    return ""


def _missing(metadata: Metadata, model: ModelSpec) -> str:
    """What the model has, and Adam keeps of it, and is not there whole. Parts of one tensor are apart."""
    for unit in get_chunk_units(model, range(model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            for kept in ("model", *MOMENTS):
                name = f"{kept}.{full_name(unit, parameter)}"
                tensor = metadata.state_dict_metadata.get(name)
                if not isinstance(tensor, TensorStorageMetadata):
                    return f"{name!r} is missing"
                if tuple(tensor.size) != parameter.shape:
                    return f"{name!r} has shape {list(tensor.size)}, but the model needs {list(parameter.shape)}"
                there = sum(chunk.sizes.numel() for chunk in tensor.chunks)
                if there < parameter.numel:
                    return f"{name!r} has {there:,} of {parameter.numel:,} elements"
    return ""
