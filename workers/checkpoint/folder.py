"""Checkpoints on disk: ROOT/<job>/<attempt>/step-<n>/, complete from the moment they have that name.

Where a training job's checkpoints lie, for whoever asks before anything is imported that saves them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from planner.facts.spec import JobSpec
from workers.checkpoint.manifest import MANIFEST, STEP, VERSION, Files, checksum, read_manifest
from workers.trainer.errors import UserError

Number = tuple[int, int]  # of a checkpoint of a job: its attempt and its step


class Checkpoint(NamedTuple):
    """A complete checkpoint. `step`: optimiser steps done."""

    path: Path
    step: int

    def name(self, root: Path) -> str:
        """As users write it: job/attempt/step-n."""
        return str(self.path.relative_to(root))


def step_folder(attempt: Path, step: int) -> Path:
    return attempt / f"step-{step:08d}"


def draft_of(folder: Path) -> Path:
    """Where a checkpoint is written until all of it is there."""
    return folder.with_name(f".{folder.name}.draft")


def complete_below(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints in a folder or its folders, the newest last: by attempt, then by step."""
    found = []
    for path in folder.glob("**/step-*"):
        matched = STEP.fullmatch(path.name)
        if matched and (path / MANIFEST).is_file():
            found.append(Checkpoint(path, int(matched[1])))
    return sorted(found, key=lambda c: (_attempt(c.path), c.step))


def _attempt(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdigit() else 0


def candidates(root: Path, wanted: str) -> list[Checkpoint]:
    """What `wanted` may mean, best first: one checkpoint and those of its attempt before it, or all of a job's.

    Raises:
        UserError: when there is none, or it lies outside the root.
    """
    base, path = root.resolve(), (root / wanted).resolve()
    if not path.is_relative_to(base) or path == base:
        raise UserError(f"`train.resume` is {wanted!r}, which is outside the checkpoint root.")
    if not STEP.fullmatch(path.name):
        found = complete_below(path)
        if not found:
            raise UserError(f"`train.resume` is {wanted!r}, which has no complete checkpoint.")
        return found[::-1]
    if not (path / MANIFEST).is_file():
        have = ", ".join(c.path.name for c in complete_below(path.parent)) or "none"
        raise UserError(
            f"`train.resume` is {wanted!r}, which is not a complete checkpoint. Complete checkpoints: {have}."
        )
    step = int(path.name.removeprefix("step-"))
    return [c for c in complete_below(path.parent)[::-1] if c.step <= step]


def number(name: str) -> Number:
    """Of what ends in attempt/step-n, as `Checkpoint.name` does."""
    attempt, _, step = name.rpartition("/step-")
    return int(attempt.rpartition("/")[2]), int(step)


def sizes(checkpoint: Path) -> dict[str, int]:
    """Bytes of all its files, the manifest last: with it the checkpoint is complete.

    Raises:
        UserError, OSError: it cannot be read.
    """
    told = {name: size for name, (size, _) in read_manifest(checkpoint).files.items()}
    return told | {MANIFEST: (checkpoint / MANIFEST).stat().st_size}


def must_have(found: list[Checkpoint], expected: str, host: str, trouble: str = "") -> None:
    """Raise where the newest of `found`, which comes first, is older than one that an earlier attempt told of.

    `trouble`: why it could not be had from the host that has it.

    Raises:
        UserError: naming it, and where it was written.
    """
    if found and (_attempt(found[0].path), found[0].step) >= number(expected):
        return
    newest = f"{found[0].path.parent.name}/{found[0].path.name}" if found else "none"
    where = f" on host {host}" if host else ""
    raise UserError(
        f"Checkpoint {expected} of an earlier attempt{where} is missing on the hosts of this attempt. "
        f"Newest checkpoint here: {newest}. "
        + (f"{trouble.rstrip('.')}. " if trouble else "")
        + "Share the checkpoint root between the hosts, or run the job on the host that has the checkpoint."
    )


def damage(checkpoint: Path, files: Files) -> str | None:
    """The first of some files that is not as it was written, in words; None when all are."""
    for name, (size, crc) in sorted(files.items()):
        path = checkpoint / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found:,} of {size:,} bytes"
            if checksum(path) != crc:
                return f"{name} changed after it was written (CRC-32 differs)"
        except OSError as error:
            return f"cannot read {name}: {error.strerror or error}"
    return None


def describe(draft: Path, names: Iterable[str]) -> Files:
    """Size and CRC-32 of files, flushed to disk."""
    found = {}
    for name in names:
        path = draft / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[name] = path.stat().st_size, checksum(path)
    return found


def publish(draft: Path, spec: JobSpec, step: int, files: Files, rng: list[int], sums: dict[str, int]) -> Path:
    """Write the manifest and give the checkpoint its name: from then on it is complete."""
    content: dict[str, Any] = {
        "version": VERSION,
        "step": step,
        "spec": spec.model_dump(mode="json"),
        "files": files,
        "rng": rng,
        "sums": sums,
    }
    with (draft / MANIFEST).open("w") as out:
        json.dump(content, out)
        out.flush()
        os.fsync(out.fileno())
    folder = draft.with_name(draft.name.removeprefix(".").removesuffix(".draft"))
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)
    return folder


def retain(attempt: Path, keep: int, published: Path) -> list[str]:
    """Delete all but the newest `keep` complete checkpoints of an attempt, or a job, and not the one just `published`:
    later ones may have been found damaged. Gives their names."""
    ours = [c for c in complete_below(attempt) if attempt in (c.path.parent, c.path.parent.parent)]
    gone = [c.path for c in ours[:-keep] if c.path != published]
    for path in gone:
        (path / MANIFEST).unlink(missing_ok=True)  # half deleted, it must not look complete
        shutil.rmtree(path, onerror=_unless_gone)
    return [path.name for path in gone]


def _unless_gone(_work: object, _path: str, failed: Any) -> None:
    """Hosts that share a root delete the same. Raises any other OSError."""
    if not isinstance(failed[1], FileNotFoundError):
        raise failed[1]


def discard_drafts(last: Path) -> list[str]:
    """Delete what saves that were cut off have left: of an attempt up to its `last` draft, and of the job's earlier
    attempts, which are over. Gives their names."""
    attempt, pattern = last.parent, ".step-*.draft"
    earlier = [path for path in attempt.parent.glob("*/") if path.name.isdigit() and int(path.name) < int(attempt.name)]
    left = [draft for folder in earlier for draft in folder.glob(pattern)]
    left += [draft for draft in attempt.glob(pattern) if draft.name <= last.name]
    for draft in left:
        shutil.rmtree(draft, ignore_errors=True)
    return [draft.name for draft in left]


class Place(NamedTuple):
    """Where a job's checkpoints lie: ROOT/job/attempt/step-n.

    `expected`: the newest that an earlier attempt told of, and on which host it was written. `loan`: where rank 0 hears
    how that host lends it, where none of this attempt has it. `host`: what this one is called.
    """

    root: Path
    job: str
    attempt: int
    expected: str = ""
    expected_on: str = ""
    loan: Path | None = None
    host: str = ""


def place_of(
    spec: JobSpec,
    root: Path | None,
    job: str,
    attempt: int,
    expected: str = "",
    expected_on: str = "",
    loan: Path | None = None,
    host: str = "",
) -> Place | None:
    """Where a job's checkpoints lie, None when it neither saves nor resumes.

    Raises:
        UserError: when it does and there is no root.
    """
    if not spec.train.checkpoint_every and spec.train.resume is None:
        return None
    if root is None:
        field = "checkpoint_every" if spec.train.checkpoint_every else "resume"
        raise UserError(f"`train.{field}` needs --checkpoint-root, the directory of the checkpoints.")
    return Place(root, job, attempt, expected, expected_on, loan, host)
