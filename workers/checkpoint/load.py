"""Load a checkpoint into any layout of the same model.

The `.metadata` file may come from another host. Nothing in it is executed, and it can refer only to files of the
checkpoint.
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
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.validation import format_count
from workers.checkpoint import folder
from workers.checkpoint import folder as manifests
from workers.checkpoint.coordination import format_error, run_on_every_rank
from workers.checkpoint.folder import Checkpoint, Files, Manifest, read_limited
from workers.checkpoint.state import (
    MOMENTS,
    BoxedState,
    BoxLoadPlanner,
    compute_tensor_checksums,
    copy_tied_embedding,
    get_model_state,
    get_optimizer_state,
    set_optimizer_steps,
)
from workers.torch_private.checkpoints import parse_metadata
from workers.trainer.errors import UserError
from workers.trainer.model.decoder import iter_model_parameters
from workers.trainer.parallel.parallelize import ModelShard

IGNORED_MODEL_FIELDS = {"preset", "moe"}
LOSS_SETTINGS = (
    *("seed", "global_batch", "seq_len", "data", "tokenizer", "column", "sampling", "document_end"),
    *("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "precision", "steps"),
)
ROUTING_SETTINGS = ("experts_per_token", "balance_loss", "capacity_factor")
METADATA = ".metadata"


class UndamagedCheckpoint(NamedTuple):
    """Store an undamaged checkpoint with its manifest and metadata."""

    checkpoint: Checkpoint
    manifest: Manifest
    metadata: Metadata


def restore(
    spec: JobSpec,
    coordinates: Coordinates,
    model: ModelShard,
    optimizer: torch.optim.Optimizer,
    found: list[Checkpoint],
    group: dist.ProcessGroup | None,
    log: Callable[[str], None],
    *,
    min_steps_left: int = 1,
) -> int:
    """Load weights and optimizer state from the first undamaged checkpoint, and return its steps. Raises UserError."""
    checkpoint_found = find_undamaged(found, group, log)
    checkpoint, manifest, _ = checkpoint_found
    differs = describe_model_difference(spec.model, manifest.spec.model)
    if differs:
        raise UserError(f"The checkpoint of `train.resume` has a different model: {differs}.")
    if manifest.step + min_steps_left > spec.train.steps:
        text = f"`train.steps` is {spec.train.steps}, but the checkpoint already has {manifest.step} steps."
        raise UserError(f"{text} Increase `train.steps`.")
    state = get_model_state(spec, coordinates, model) | get_optimizer_state(spec, coordinates, model, optimizer)
    read_tensors(state, checkpoint_found)
    set_optimizer_steps(model, optimizer, manifest.step)
    copy_tied_embedding(spec, model, optimizer)
    model.copy_masters_to_weights()
    _check_tensor_checksums(state, spec, checkpoint_found, group)
    torch.set_rng_state(_get_rng_state(manifest))
    note = "" if manifest.step < spec.train.steps else ", no steps left"
    moved = _describe_changes(spec, manifest.spec, manifest.step)
    log(f"resumed from {checkpoint.path.name}: {manifest.step} steps done{note}{moved}")
    return manifest.step


def _check_tensor_checksums(
    state: BoxedState, spec: JobSpec, checkpoint_found: UndamagedCheckpoint, group: dist.ProcessGroup | None
) -> None:
    """Raise a `UserError` on all ranks if loaded tensors differ from the saved tensors."""
    saved = checkpoint_found.manifest.sums
    current, previous = (get_mixed_precision(s.train.precision) for s in (spec, checkpoint_found.manifest.spec))
    if not saved or (current.sharded_bytes, current.moment_bytes) != (previous.sharded_bytes, previous.moment_bytes):
        return  # The checkpoint has no checksums, or other dtypes.
    found = compute_tensor_checksums(state, spec.model, group)
    mismatches = [name for name, value in found.items() if saved.get(name) != value]
    if mismatches:
        more = f" and {len(mismatches) - 1} more differ" if mismatches[1:] else " differs"
        name = checkpoint_found.checkpoint.path.name
        raise UserError(f"`train.resume`: {mismatches[0]}{more} from checkpoint {name} after loading.")


def read_tensors(state: BoxedState, found: UndamagedCheckpoint) -> None:
    """Read this rank's boxes of a state. Nothing is sent. Raises UserError."""
    reader = CheckpointReader(found.checkpoint.path, found.metadata)
    try:
        with torch.no_grad():
            dcp_load(dict(state), storage_reader=reader, planner=BoxLoadPlanner(), no_dist=True)
    except (CheckpointException, OSError) as error:
        raise UserError(f"Cannot read checkpoint {found.checkpoint.path.name}: {format_error(error)}") from None


def find_undamaged(
    found: list[Checkpoint], group: dist.ProcessGroup | None, log: Callable[[str], None]
) -> UndamagedCheckpoint:
    """Return the first undamaged checkpoint. Ranks share the reading of files. Raises UserError."""
    problems = []
    for checkpoint in found:
        problem = _inspect(checkpoint, group)
        if isinstance(problem, UndamagedCheckpoint):
            return problem
        problems.append(f"{checkpoint.path.name}: {problem}")
        log(f"checkpoint {checkpoint.path.name} is damaged: {problem}. Trying the previous checkpoint.")
    raise UserError(f"`train.resume` has no undamaged checkpoint. {'; '.join(problems)}")


def describe_model_difference(wanted: ModelSpec, held: ModelSpec) -> str:
    """Return how the shapes of two models differ, or an empty text."""
    ours, theirs = ({**m.model_dump(exclude=IGNORED_MODEL_FIELDS), "head_dim": m.head_size} for m in (wanted, held))
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


def _inspect(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> UndamagedCheckpoint | str:
    """Return the checkpoint, or its damage on some rank.

    Ranks that see the same files share the checks of contents, because each host may have its own files.
    """
    rank = 0 if group is None else group.rank()
    path, found = checkpoint.path, list[UndamagedCheckpoint]()  # The result stays on this rank.

    def identity() -> tuple[int, int]:
        value = (path / manifests.MANIFEST).stat()
        return value.st_ino, value.st_mtime_ns

    def damage() -> str | None:
        files = manifests.read_manifest(path).files
        return folder.find_damage(path, dict(sorted(files.items())[same.index(rank) :: len(same)]))

    def look() -> None:
        manifest = manifests.read_manifest(path)
        _get_rng_state(manifest)
        found.append(UndamagedCheckpoint(checkpoint, manifest, read_metadata(path, manifest)))

    try:
        seen = run_on_every_rank(identity, group)
        same = [other for other, value in enumerate(seen) if value == seen[rank]]
        problem = next((problem for problem in run_on_every_rank(damage, group) if problem), None)
        if problem is None:
            run_on_every_rank(look, group)
    except UserError as error:
        return str(error)
    return found[0] if problem is None else problem


def _get_rng_state(manifest: Manifest) -> torch.Tensor:
    """Return the state of the random generator, and raise a `UserError` if it is invalid."""
    state = torch.tensor(manifest.rng, dtype=torch.uint8)
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        raise UserError(f"{manifests.MANIFEST}: the random generator state is invalid") from None
    return state


def _describe_changes(spec: JobSpec, before: JobSpec, done: int) -> str:
    """Return the changes since the checkpoint that affect the loss curve, after `done` steps."""
    differing = [(name, getattr(before.train, name), getattr(spec.train, name)) for name in LOSS_SETTINGS]
    if spec.model.moe and before.model.moe:
        differing += [(f"moe.{n}", getattr(before.model.moe, n), getattr(spec.model.moe, n)) for n in ROUTING_SETTINGS]
    changed = [f"{name} changed from {old} to {new}" for name, old, new in differing if old != new]
    changed += _describe_epoch_change(spec, before, done)
    layout = "" if before.layout == spec.layout else ", with a different layout"
    return layout + (f" ({'; '.join(changed)})" if changed else "")


def _describe_epoch_change(spec: JobSpec, before: JobSpec, done: int) -> list[str]:
    """Return how a different global batch changes the position in the epoch."""
    previous, current = before.train, spec.train
    if current.sampling != "epochs" or previous.sampling != "epochs" or previous.global_batch == current.global_batch:
        return []
    difference = format_count(done * abs(current.global_batch - previous.global_batch), "sequence")
    note = "skipped" if current.global_batch > previous.global_batch else "repeated"
    return [f"data continues at sequence {done} x {current.global_batch}: {difference} of the epoch order {note}"]


class CheckpointReader(FileSystemReader):
    """Read files with parsed metadata. The default reader would unpickle `.metadata`."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(checkpoint: Path, manifest: Manifest) -> Metadata:
    """Read and check the metadata of a checkpoint. Raises UserError."""
    try:
        metadata = parse_metadata(read_limited(checkpoint / METADATA, MAX_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {METADATA}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{METADATA} is refused: {error}") from None
    problem = _find_missing_file(metadata, manifest.files) or _find_invalid_shard(metadata)
    if problem := problem or _find_missing_tensor(metadata, manifest.spec.model):
        raise UserError(f"{METADATA} is wrong: {problem}")
    return metadata


def _find_missing_file(metadata: Metadata, files: Files) -> str:
    """Return a text that describes data outside the checkpoint's files."""
    for index, info in metadata.storage_data.items():
        if info.relative_path not in files:
            return (
                f"{index.fqn[:100]!r} is stored in {info.relative_path[:100]!r}, which is not a file of the checkpoint"
            )
        end, (size, _) = info.offset + info.length, files[info.relative_path]
        if end > size:
            return f"{index.fqn[:100]!r} ends at byte {end:,} of {info.relative_path}, which has {size:,}"
    return ""


def _find_invalid_shard(metadata: Metadata) -> str:
    """Return a text that describes a shard outside its tensor or without a file."""
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # The parser creates no other type.
        for chunk in tensor.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
                offset + size > whole_size
                for offset, size, whole_size in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            ):
                return f"{name[:100]!r} of shape {list(tensor.size)} has a shard outside the tensor"
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                return f"{name[:100]!r} has a shard at offset {list(chunk.offsets)} that no file stores"
    return ""


def _find_missing_tensor(metadata: Metadata, model: ModelSpec) -> str:
    """Return a text that describes a missing or incomplete tensor."""
    for model_name, parameter in iter_model_parameters(model):
        for kind in ("model", *MOMENTS):
            name = f"{kind}.{model_name}"
            tensor = metadata.state_dict_metadata.get(name)
            if not isinstance(tensor, TensorStorageMetadata):
                return f"{name!r} is missing"
            if tuple(tensor.size) != parameter.shape:
                return f"{name!r} has shape {list(tensor.size)}, but the model needs {list(parameter.shape)}"
            num_elements = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if num_elements < parameter.numel:
                return f"{name!r} has {num_elements:,} of {parameter.numel:,} elements"
    return ""
