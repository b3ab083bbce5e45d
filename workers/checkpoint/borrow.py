"""Copy a checkpoint from a host outside the attempt. Rank 0 requests it, and the other ranks wait."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from contracts.codec import BadMessageError, validate_loan
from contracts.control import Loan
from workers.checkpoint import folder
from workers.checkpoint.coordination import format_error, run_on_first_rank
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
from workers.checkpoint.manifest import read_manifest
from workers.trainer.errors import UserError

LOAN_TIMEOUT_S = 90.0  # The lending host may serve other requests first.
POLL_INTERVAL_S = 0.2
PART_BYTES = 64 * 2**20  # per request, so that no rank and no lender times out


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
        """Connect to the lender, and return its offer.

        Raises:
            UserError: if the lender has no suitable checkpoint.
        """
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
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        self._stack.callback(shutil.rmtree, self._draft, ignore_errors=True)
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
        """Publish an undamaged checkpoint, and keep the newest `max_checkpoints`.

        Raises:
            UserError: if the checkpoint is damaged.
        """
        if damage := folder.find_damage(self._draft, read_manifest(self._draft).files):
            raise UserError(f"The checkpoint from host {self._host} is damaged: {damage}")
        shutil.rmtree(self._path, ignore_errors=True)  # partly deleted
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


def _read_loan(path: Path) -> Loan:
    """Return the loan that the supervisor writes.

    Raises:
        UserError: if it is missing or invalid.
    """
    deadline = time.monotonic() + LOAN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"The host with the checkpoint did not answer within {LOAN_TIMEOUT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)
    try:
        return validate_loan(json.loads(path.read_text()))
    except (ValueError, BadMessageError) as error:
        raise UserError(f"The supervisor sent an invalid checkpoint offer: {error}") from None
