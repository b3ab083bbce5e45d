"""Copy checkpoints between hosts that share no checkpoint root. On a shared root nothing is copied.

Within an attempt, checkpoints travel over the process group for saves: they are collected on rank 0's host, and copied
to every host without them before a run resumes. From a host outside the attempt, rank 0 copies over a socket.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
import torch.distributed as dist

from contracts.codec import BadMessageError, validate_loan_address
from contracts.control import LoanAddress
from workers.checkpoint import folder
from workers.checkpoint.coordination import format_error, run_on_every_rank, run_on_first_rank
from workers.checkpoint.folder import MANIFEST, open_regular, read_manifest
from workers.checkpoint.lend import (
    CHUNK_BYTES,
    HANDSHAKE_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    LENGTH,
    MAX_OFFER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    BadOfferError,
    Offer,
    compute_proof,
    decode_offer,
)
from workers.disk import DISK_FULL_ERRNOS, discard_path, format_free_bytes
from workers.trainer.errors import UserError

COLLECTED_CHUNK_BYTES = 16 * 2**20
BARRIER_CHUNKS = 16  # chunks between barriers
LOAN_TIMEOUT_S = 90.0  # The lending host may serve other requests first.
POLL_INTERVAL_S = 0.2
PART_BYTES = 64 * 2**20  # per request, so that no rank and no lender times out


class _HostState(NamedTuple):
    """Store the checkpoints of a job on the host of a rank."""

    numbers: frozenset[folder.CheckpointId]
    undamaged: frozenset[folder.CheckpointId]  # checkpoints whose files have the saved sizes
    is_first_on_host: bool  # first rank of its host, which receives for all


def collect_files(draft: Path, files: dict[str, tuple[int, int]], group: dist.ProcessGroup | None) -> None:
    """Send files of a draft to rank 0 if it does not see them. All ranks call this together. Raises UserError."""
    if group is None:
        return
    missing = run_on_first_rank(lambda: sorted(name for name in files if not (draft / name).is_file()), group)
    problem, transfer = "", _FileTransfer(group)
    for name in missing:
        # __RANK_n.distcp is written by its rank, other files by rank 0.
        writer = int(name.split("_")[2]) if name.startswith("__") else 0
        problem = transfer.copy(draft / name, files[name][0], writer, 0, files[name][1]) or problem
    run_on_every_rank(lambda: _raise_problem(problem), group)


def discard_draft(draft: Path) -> None:
    """Delete a draft that is published or failed, and earlier drafts on this host."""
    if _is_first_on_host():
        folder.delete_drafts(draft)


def distribute(job: Path, group: dist.ProcessGroup | None, keep: int) -> list[folder.CheckpointId]:
    """Copy the newest undamaged checkpoint of a job to every host without it. All ranks call this together.

    Each host keeps `keep` checkpoints. Returns the checkpoints that are damaged on all their hosts. Raises UserError.
    """
    damaged: list[folder.CheckpointId] = []
    if group is None:
        return damaged

    def get_host_state() -> _HostState:
        numbers = list_checkpoint_ids(job)
        undamaged = [one for one in numbers if _describe_undamaged(_path(job, one))]
        return _HostState(frozenset(numbers), frozenset(undamaged), _is_first_on_host())

    states = run_on_every_rank(get_host_state, group)
    leaders = [rank for rank, one in enumerate(states) if one.is_first_on_host]
    for number in sorted({number for one in states for number in one.numbers}, reverse=True):
        holders = [leader for leader in leaders if number in states[leader].undamaged]
        receivers = [leader for leader in leaders if leader not in holders]
        if not receivers or any(_copy_to_hosts(job, number, holder, receivers, keep, group) for holder in holders):
            break
        damaged.append(number)
    return damaged


def _copy_to_hosts(
    job: Path, number: folder.CheckpointId, source: int, receivers: list[int], keep: int, group: dist.ProcessGroup
) -> bool:
    """Copy a checkpoint, and return False if the source is damaged."""
    path = _path(job, number)
    rank, draft, transfer = group.rank(), folder.get_draft_path(path), _FileTransfer(group)
    files = run_on_every_rank(lambda: _describe_undamaged(path) if rank == source else {}, group)[source]
    if not files:
        return False
    for receiver in receivers:
        # Another receiver may share this host's root.
        if run_on_every_rank(lambda: bool(_describe_undamaged(path)), group)[receiver]:
            continue
        problem = _create_draft(draft) if rank == receiver else ""
        for name, (size, crc) in files.items():
            folder_here = draft if rank == receiver else path
            problem = transfer.copy(folder_here / name, size, source, receiver, crc) or problem
        damaged = bool(run_on_every_rank(partial(str, problem), group)[source])
        end = partial(_finish_draft, draft, path, damaged, problem, keep)
        run_on_every_rank(end if rank == receiver else lambda: None, group)
        if damaged:
            return False
    return True


def _finish_draft(draft: Path, path: Path, damaged: bool, problem: str, keep: int) -> None:
    """Publish or delete a received draft, and raise a `UserError` if it cannot be written."""
    if damaged or problem:
        discard_path(draft)
    if damaged:
        return
    _raise_problem(problem or _publish_draft(draft, path))
    folder.retain_newest(path.parents[1], keep, path)


def _path(job: Path, number: folder.CheckpointId) -> Path:
    attempt, step = number
    return folder.get_step_folder(job / str(attempt), step)


def list_checkpoint_ids(job: Path) -> list[folder.CheckpointId]:
    """Return the ids of a job's complete checkpoints on this host, newest last."""
    found = [c for c in folder.list_complete(job) if c.path.parent.parent == job and c.path.parent.name.isdecimal()]
    return [(int(one.path.parent.name), one.step) for one in found]


def _is_first_on_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _describe_undamaged(path: Path) -> dict[str, tuple[int, int | None]]:
    """Return (bytes, CRC-32) of a checkpoint's files, the manifest last.

    The result is empty if a file is unreadable or has a different size.
    """
    try:
        files = {**read_manifest(path).files, MANIFEST: ((path / MANIFEST).stat().st_size, None)}
        return files if all((path / name).stat().st_size == size for name, (size, _) in files.items()) else {}
    except (UserError, OSError):
        return {}


def _create_draft(draft: Path) -> str:
    """Create an empty draft, and return the problem or an empty text."""
    try:
        discard_path(draft)
        draft.mkdir(parents=True)
    except OSError as error:
        return _format_os_error(error, draft)
    return ""


def _publish_draft(draft: Path, path: Path) -> str:
    """Rename a complete draft, and return the problem or an empty text."""
    if _describe_undamaged(path):  # Another rank published it on a shared root.
        discard_path(draft)
        return ""
    discard_path(path)  # partly deleted or damaged
    try:
        draft.rename(path)
    except OSError as error:
        return _format_os_error(error, draft)
    return ""


class _FileTransfer:
    """Copy files from rank to rank, with regular barriers so that no rank times out."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._chunks = group, 0

    def copy(self, path: Path, size: int, source: int, receiver: int, crc: int | None) -> str:
        """Copy a file. All ranks call this together. `crc` is the expected CRC-32 of the source.

        The transfer continues after an error. Returns the problem, or an empty text.
        """
        rank, group = self._group.rank(), self._group
        file = _FileEnd(path, "rb" if rank == source else "wb" if rank == receiver else "")
        for begin in range(0, size, COLLECTED_CHUNK_BYTES):
            count = min(COLLECTED_CHUNK_BYTES, size - begin)
            if rank == source:
                part = torch.zeros(count, dtype=torch.uint8)
                file.read(_get_buffer(part))
                dist.send(part, group=group, group_dst=receiver)
            elif rank == receiver:
                part = torch.empty(count, dtype=torch.uint8)
                dist.recv(part, group=group, group_src=source)
                file.write(_get_buffer(part))
            self._synchronize(file)
        self._synchronize(file)
        return file.close(crc)

    def _synchronize(self, file: _FileEnd) -> None:
        self._chunks += 1
        if self._chunks % BARRIER_CHUNKS == 0:
            file.sync()
            dist.barrier(self._group)


class _FileEnd:
    """One end of a file transfer. After the first problem, it does nothing."""

    def __init__(self, path: Path, mode: Literal["rb", "wb", ""]) -> None:
        self._path, self._mode, self._problem, self._crc = path, mode, "", 0
        self._file: BinaryIO | None = None
        if mode:
            self._try(self._open)

    def read(self, part: memoryview) -> None:
        if self._file is not None and not self._problem:
            self._try(partial(self._file.readinto, part))  # type: ignore[attr-defined]  # BinaryIO lacks readinto
            self._crc = zlib.crc32(part, self._crc)

    def write(self, part: memoryview) -> None:
        if self._file is not None and not self._problem:
            self._try(partial(self._file.write, part))

    def sync(self) -> None:
        """Flush written data to disk. A flush at the end of a large file could take too long."""
        if self._file is not None and self._mode == "wb" and not self._problem:
            self._try(self._sync)

    def close(self, crc: int | None) -> str:
        """Close the file, and return the problem or an empty text."""
        if self._file is not None:
            self._try(self._close)
        if self._mode == "rb" and crc is not None and crc != self._crc:
            return self._problem or f"{self._path.name} changed after it was written"
        return self._problem

    def _open(self) -> None:
        self._file = open(self._path, "rb", opener=open_regular) if self._mode == "rb" else self._path.open("wb")  # noqa: SIM115

    def _close(self) -> None:
        assert self._file is not None
        with self._file:
            if self._mode == "wb":
                self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self._problem = self._problem or _format_os_error(error, self._path)


def _get_buffer(part: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    held: Any = part.numpy()
    return memoryview(held)


def _raise_problem(problem: str) -> None:
    if problem:
        raise UserError(f"Cannot copy the checkpoint to this host: {problem}")


def _format_os_error(error: OSError, path: Path) -> str:
    free = format_free_bytes(path) if error.errno in DISK_FULL_ERRNOS else ""
    return f"{error.strerror or error}: {error.filename or path}{free}"


class BorrowResult(NamedTuple):
    """Store the copied checkpoint, or the problem."""

    name: str = ""
    num_bytes: int = 0
    took_s: float = 0.0
    problem: str = ""


def borrow(
    job: Path, loan: Path | None, min_id: folder.CheckpointId, group: dist.ProcessGroup | None, keep: int
) -> BorrowResult:
    """Copy a checkpoint with at least `min_id` to rank 0's host. All ranks call this together.

    Args:
        job: folder of the job.
        loan: file into which rank 0's supervisor writes the lender.
        min_id: oldest acceptable checkpoint.
        group: all ranks, or None.
        keep: checkpoints that a host keeps.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        connection = _LenderConnection(stack)
        try:
            offer = run_on_first_rank(lambda: connection.open(loan, job, min_id), group)
            for name, size in offer.sizes.items():
                for begin in range(0, max(size, 1), PART_BYTES):
                    run_on_first_rank(
                        partial(connection.take, name, min(PART_BYTES, size - begin), size - begin), group
                    )
            run_on_first_rank(lambda: connection.keep(keep), group)
        except UserError as error:
            return BorrowResult(problem=str(error))
    return BorrowResult(offer.name, sum(offer.sizes.values()), time.monotonic() - began)


class _LenderConnection:
    """Connect rank 0 to the lender. Other ranks never open the connection."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._host = ""

    def open(self, loan: Path | None, job: Path, min_id: folder.CheckpointId) -> Offer:
        """Connect to the lender, and return its offer. Raises UserError."""
        if loan is None:
            raise UserError("The board did not name a host that can send the checkpoint")
        loan_message = _read_loan(loan)
        self._host = loan_message["host"]
        try:
            self._socket = self._stack.enter_context(
                socket.create_connection((loan_message["address"], loan_message["port"]), HANDSHAKE_TIMEOUT_S)
            )
            offer = self._authenticate(loan_message["secret"])
        except (OSError, BadOfferError) as error:
            raise self._make_error(error) from None
        if offer.problem:
            raise UserError(f"Host {self._host} reports: {offer.problem[:300]}")
        if folder.parse_checkpoint_id(offer.name) < min_id:
            raise UserError(f"The newest checkpoint on host {self._host} is {offer.name}")
        self._path = job / offer.name
        self._draft = folder.get_draft_path(self._path)
        discard_path(self._draft)
        self._draft.mkdir(parents=True)
        self._stack.callback(discard_path, self._draft)
        return offer

    def take(self, name: str, size: int, bytes_left: int) -> None:
        """Receive the next `size` bytes of a file, of which `bytes_left` are missing."""
        with (self._draft / name).open("ab") as file:
            bytes_after = bytes_left - size
            while size:
                try:
                    part = self._socket.recv(min(CHUNK_BYTES, size))
                except OSError as error:
                    raise self._make_error(error) from None
                if not part:
                    raise UserError(
                        f"Host {self._host} closed the connection with {bytes_after + size:,} bytes of {name} left"
                    )
                size -= len(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def keep(self, max_checkpoints: int) -> None:
        """Publish an undamaged checkpoint, and keep the newest `max_checkpoints`. Raises UserError."""
        if damage := folder.find_damage(self._draft, read_manifest(self._draft).files):
            raise UserError(f"The checkpoint from host {self._host} is damaged: {damage}")
        discard_path(self._path)  # partly deleted
        self._draft.rename(self._path)
        folder.retain_newest(self._path.parents[1], max_checkpoints, self._path)

    def _authenticate(self, secret: str) -> Offer:
        """Prove the secret in both directions, and return the lender's offer."""
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(own_nonce)
        lender_nonce, lender_proof = self._read(NONCE_BYTES), self._read(PROOF_BYTES)
        if not hmac.compare_digest(lender_proof, compute_proof(secret, "lender", lender_nonce, own_nonce)):
            raise BadOfferError("a different host answered")
        self._socket.sendall(compute_proof(secret, "borrower", lender_nonce, own_nonce))
        self._socket.settimeout(IDLE_TIMEOUT_S)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > MAX_OFFER_BYTES:
            raise BadOfferError(
                f"the list of checkpoint files has {length:,} bytes, more than the limit of {MAX_OFFER_BYTES:,}"
            )
        return decode_offer(self._read(length))

    def _read(self, size: int) -> bytes:
        read = b""
        while len(read) < size:
            part = self._socket.recv(size - len(read))
            if not part:
                raise OSError("the connection was closed")
            read += part
        return read

    def _make_error(self, error: Exception) -> UserError:
        return UserError(f"Host {self._host} could not send the checkpoint: {format_error(error)}")


def _read_loan(path: Path) -> LoanAddress:
    """Return the loan that the supervisor writes. Raises UserError."""
    deadline = time.monotonic() + LOAN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"The host with the checkpoint did not answer within {LOAN_TIMEOUT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)
    try:
        return validate_loan_address(json.loads(path.read_text()))
    except (ValueError, BadMessageError) as error:
        raise UserError(f"The supervisor sent an invalid checkpoint offer: {error}") from None
