"""Folders of checkpoints (ROOT/<job>/<attempt>/step-<n>/), and their manifests.

A checkpoint is written to a draft folder, and is complete when the folder has its final name. Files may come from
another host or a damaged disk, so everything is checked.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import DEFAULT_ROPE_BASE, JobSpec
from planner.facts.validation import SpecError
from workers.disk import discard_path, remove_path
from workers.trainer.errors import UserError

CheckpointId = tuple[int, int]  # (attempt, step) of a checkpoint
READ_BYTES = 2**20
MANIFEST = "manifest.json"
VERSION = 1
STEP = re.compile(r"step-(\d{8,})")
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_INT64 = 2**63 - 1
Files = dict[str, tuple[int, int]]


class Checkpoint(NamedTuple):
    """Store a complete checkpoint and its number of training steps."""

    path: Path
    step: int

    def get_name(self, root: Path) -> str:
        """Return the name as users write it: job/attempt/step-n."""
        return str(self.path.relative_to(root))


def get_step_folder(attempt: Path, step: int) -> Path:
    return attempt / f"step-{step:08d}"


def get_draft_path(folder: Path) -> Path:
    """Return the folder of a checkpoint that is being written."""
    return folder.with_name(f".{folder.name}.draft")


def list_complete(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints below a folder, sorted by attempt, then by step."""
    found = []
    for path in folder.glob("**/step-*"):
        matched = STEP.fullmatch(path.name)
        if matched and (path / MANIFEST).is_file():
            found.append(Checkpoint(path, int(matched[1])))
    return sorted(found, key=lambda c: (_get_attempt(c.path), c.step))


def _get_attempt(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdigit() else 0


def list_candidates(root: Path, wanted: str) -> list[Checkpoint]:
    """Return the checkpoints that `wanted` selects, best first.

    `wanted` names one checkpoint, which also selects earlier checkpoints of its attempt, or a job. Raises UserError.
    """
    base, path = root.resolve(), (root / wanted).resolve()
    if not path.is_relative_to(base) or path == base:
        raise UserError(f"`train.resume` is {wanted!r}, which is outside the checkpoint root.")
    if not STEP.fullmatch(path.name):
        found = list_complete(path)
        if not found:
            raise UserError(f"`train.resume` is {wanted!r}, which has no complete checkpoint.")
        return found[::-1]
    if not (path / MANIFEST).is_file():
        have = ", ".join(c.path.name for c in list_complete(path.parent)) or "none"
        raise UserError(
            f"`train.resume` is {wanted!r}, which is not a complete checkpoint. Complete checkpoints: {have}."
        )
    step = int(path.name.removeprefix("step-"))
    return [c for c in list_complete(path.parent)[::-1] if c.step <= step]


def parse_checkpoint_id(name: str) -> CheckpointId:
    """Return (attempt, step) of a name that ends in attempt/step-n."""
    attempt, _, step = name.rpartition("/step-")
    return int(attempt.rpartition("/")[2]), int(step)


def get_file_sizes(checkpoint: Path) -> dict[str, int]:
    """Return the sizes of all files. The manifest is last, because it completes the checkpoint.

    Raises:
        UserError: if the manifest is invalid.
        OSError: if the manifest cannot be read.
    """
    sizes = {name: size for name, (size, _) in read_manifest(checkpoint).files.items()}
    return sizes | {MANIFEST: (checkpoint / MANIFEST).stat().st_size}


def require_expected(checkpoints: list[Checkpoint], expected: str, host: str, problem: str = "") -> None:
    """Raise if the newest checkpoint is older than the checkpoint that an earlier attempt reported.

    Args:
        checkpoints: checkpoints of this job, newest first.
        expected: name of the reported checkpoint.
        host: host that wrote it.
        problem: reason why that host could not send it.

    Raises:
        UserError: if the newest checkpoint is older.
    """
    if checkpoints and (_get_attempt(checkpoints[0].path), checkpoints[0].step) >= parse_checkpoint_id(expected):
        return
    newest = f"{checkpoints[0].path.parent.name}/{checkpoints[0].path.name}" if checkpoints else "none"
    where = f" on host {host}" if host else ""
    raise UserError(
        f"Checkpoint {expected} of an earlier attempt{where} is missing on the hosts of this attempt. "
        f"Newest checkpoint here: {newest}. "
        + (f"{problem.rstrip('.')}. " if problem else "")
        + "Share the checkpoint root between the hosts, or run the job on the host that has the checkpoint."
    )


def find_damage(checkpoint: Path, files: Files) -> str | None:
    """Return a text that describes the first damaged file, or None."""
    for name, (size, crc) in sorted(files.items()):
        path = checkpoint / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != size:
                return f"{name} has {num_bytes:,} of {size:,} bytes"
            if checksum(path) != crc:
                return f"{name} changed after it was written (CRC-32 differs)"
        except OSError as error:
            return f"cannot read {name}: {error.strerror or error}"
    return None


def describe_files(draft: Path, names: Iterable[str]) -> Files:
    """Flush files to disk, and return their sizes and CRC-32."""
    found = {}
    for name in names:
        path = draft / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[name] = path.stat().st_size, checksum(path)
    return found


def publish(draft: Path, spec: JobSpec, step: int, files: Files, rng: list[int], sums: dict[str, int]) -> Path:
    """Write the manifest, and rename the draft to its final name."""
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
        remove_path(folder)
    draft.rename(folder)
    return folder


def retain_newest(attempt: Path, keep: int, published: Path) -> list[str]:
    """Delete old complete checkpoints of an attempt or a job, and return their names.

    The newest `keep` checkpoints stay. `published` also stays, because later checkpoints may be damaged.
    """
    checkpoints = [c for c in list_complete(attempt) if attempt in (c.path.parent, c.path.parent.parent)]
    deleted = [c.path for c in checkpoints[:-keep] if c.path != published]
    for path in deleted:
        (path / MANIFEST).unlink(missing_ok=True)  # A partly deleted checkpoint must not look complete.
        remove_path(path)
    return [path.name for path in deleted]


def delete_drafts(last: Path) -> list[str]:
    """Delete drafts of interrupted saves, and return their names.

    These are drafts of this attempt up to `last`, and drafts of earlier attempts.
    """
    attempt, pattern = last.parent, ".step-*.draft"
    earlier = [path for path in attempt.parent.glob("*/") if path.name.isdigit() and int(path.name) < int(attempt.name)]
    drafts = [draft for folder in earlier for draft in folder.glob(pattern)]
    drafts += [draft for draft in attempt.glob(pattern) if draft.name <= last.name]
    for draft in drafts:
        discard_path(draft)
    return [draft.name for draft in drafts]


class CheckpointLocation(NamedTuple):
    """Store the folder of a job's checkpoints: ROOT/job/attempt/step-n.

    `expected` is the newest checkpoint that an earlier attempt reported, written on `expected_host`. `loan` is the file
    into which the supervisor writes how that host sends it. `host` is the name of this host.
    """

    root: Path
    job: str
    attempt: int
    expected: str = ""
    expected_host: str = ""
    loan: Path | None = None
    host: str = ""


def get_checkpoint_location(
    spec: JobSpec, root: Path | None, job: str, attempt: int, *others: Any
) -> CheckpointLocation | None:
    """Return the location of a job's checkpoints, or None if it neither saves nor resumes. Raises UserError."""
    if not spec.train.checkpoint_every and spec.train.resume is None:
        return None
    if root is None:
        field = "checkpoint_every" if spec.train.checkpoint_every else "resume"
        raise UserError(f"`train.{field}` needs --checkpoint-root, the directory of the checkpoints.")
    return CheckpointLocation(root, job, attempt, *others)


def is_plain_file_name(name: str) -> bool:
    """Return whether a file name stays in its folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(name) <= 255


def open_regular(path: str, flags: int) -> int:
    """Open a regular file. Symlinks could lead anywhere, and a FIFO would block. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`. Raises OSError, ValueError."""
    with open(path, "rb", opener=open_regular) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"the file has more than {max_bytes:,} bytes")
    return data


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, "rb", opener=open_regular) as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


class Manifest(NamedTuple):
    """Store the spec and step of a checkpoint, sizes and CRC-32 of its files, and tensor checksums.

    Older checkpoints have no tensor checksums.
    """

    spec: JobSpec
    step: int
    files: Files
    rng: list[int]
    sums: dict[str, int]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises UserError."""
    try:
        content = json.loads(read_limited(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
        _check(type(content) is dict, "the JSON is not an object")
        _check(
            content["version"] == VERSION,
            f"the version is {str(content['version'])[:40]}, expected {VERSION}",
        )
        spec, step, rng, sums = content["spec"], content["step"], content["rng"], content.get("sums", {})
        _check(type(spec) is dict and type(spec.get("model")) is dict, "the spec has no model")
        spec["model"].setdefault("rope_base", DEFAULT_ROPE_BASE)  # default before the field existed
        parsed = parse_spec(spec)
        _check(_is_number(step, MAX_INT64), f"the step is {str(step)[:40]}")
        name_match = STEP.fullmatch(checkpoint.name)
        _check(name_match is None or int(name_match[1]) == step, f"the step is {step}")
        files = _parse_files(content["files"])
        rng_is_bytes = type(rng) is list and all(_is_number(byte, 255) for byte in rng)
        _check(rng_is_bytes, "the random generator state is not bytes")
        valid = type(sums) is dict and all(type(crc) is int and abs(crc) <= MAX_INT64 + 1 for crc in sums.values())
        _check(valid, "the checksums are not an object of names and integers")
        return Manifest(parsed, step, files, rng, sums)
    except KeyError as error:
        problem = f"{error} is missing"
    except RecursionError:
        problem = "the JSON is nested too deeply"
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, SpecError) as error:
        problem = str(error)
    raise UserError(f"cannot read {MANIFEST}: {problem}")


def _parse_files(value: Any) -> Files:
    _check(type(value) is dict and bool(value), "the list of files is missing")
    for name, entry in value.items():
        _check(is_plain_file_name(name), f"{name[:100]!r} is not a file name")
        _check(type(entry) is list and len(entry) == 2, f"size and CRC-32 of {name} are missing")
        _check(
            _is_number(entry[0], MAX_INT64) and _is_number(entry[1], 2**32 - 1), f"size or CRC-32 of {name} is invalid"
        )
    return {name: (size, crc) for name, (size, crc) in value.items()}


def _is_number(value: Any, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


def _check(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
