"""A checkpoint that no host of an attempt has, from the one that does: rank 0 asks for it, the others hear of it."""

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
from workers.checkpoint.coordination import on_first_rank, words_of
from workers.checkpoint.lend import (
    CHUNK_BYTES,
    GREETING_S,
    IDLE_S,
    LENGTH,
    NONCE_BYTES,
    OFFER_BYTES,
    PROOF_BYTES,
    BadOfferError,
    Offer,
    decode,
    proof,
)
from workers.checkpoint.manifest import read_manifest
from workers.trainer.errors import UserError

PATIENCE_S = 90.0  # for the host to say where it lends: it was told when we were, and others may have their turn first
LOOK_S = 0.2
PART_BYTES = 64 * 2**20  # of a file: ranks wait for each other, and the lender for a disk, only so long


class Borrowed(NamedTuple):
    """What came, or else why nothing did."""

    name: str = ""
    num_bytes: int = 0
    took_s: float = 0.0
    problem: str = ""


def borrow(job: Path, loan: Path | None, least: folder.Number, group: dist.ProcessGroup | None, keep: int) -> Borrowed:
    """A checkpoint that is not older than `least`, to rank 0's host. All ranks call this alike.

    `loan`: where rank 0's supervisor leaves word of who lends it. `keep`: how many a host keeps.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        line = _Line(stack)
        try:
            offer = on_first_rank(lambda: line.open(loan, job, least), group)
            for name, size in offer.sizes.items():
                for begin in range(0, max(size, 1), PART_BYTES):
                    on_first_rank(partial(line.take, name, min(PART_BYTES, size - begin), size - begin), group)
            on_first_rank(lambda: line.keep(keep), group)
        except UserError as error:
            return Borrowed(problem=str(error))
    return Borrowed(offer.name, sum(offer.sizes.values()), time.monotonic() - began)


class _Line:
    """Rank 0's way to the lender; of the other ranks it is never opened."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._host = ""

    def open(self, loan: Path | None, job: Path, least: folder.Number) -> Offer:
        """Raises UserError, OSError."""
        if loan is None:
            raise UserError("The board did not name a host that can send the checkpoint")
        told = _told(loan)
        self._host = told["host"]
        try:
            self._socket = self._stack.enter_context(
                socket.create_connection((told["address"], told["port"]), GREETING_S)
            )
            offer = self._greeted(told["secret"])
        except (OSError, BadOfferError) as error:
            raise self._failed(error) from None
        if offer.problem:
            raise UserError(f"Host {self._host} reports: {offer.problem[:300]}")
        if folder.number(offer.name) < least:
            raise UserError(f"The newest checkpoint on host {self._host} is {offer.name}")
        self._path = job / offer.name
        self._draft = folder.draft_of(self._path)
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        self._stack.callback(shutil.rmtree, self._draft, ignore_errors=True)
        return offer

    def take(self, name: str, size: int, left: int) -> None:
        """The next `size` bytes of a file, of which `left` are to come. Raises UserError, OSError."""
        with (self._draft / name).open("ab") as file:
            after = left - size
            while size:
                try:
                    part = self._socket.recv(min(CHUNK_BYTES, size))
                except OSError as error:
                    raise self._failed(error) from None
                if not part:
                    raise UserError(
                        f"Host {self._host} closed the connection with {after + size:,} bytes of {name} left"
                    )
                size -= len(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def keep(self, most: int) -> None:
        """Give what came whole its name, and keep the newest `most`: for what is damaged nothing of ours goes.

        Raises:
            OSError
            UserError: it is damaged.
        """
        if damage := folder.damage(self._draft, read_manifest(self._draft).files):
            raise UserError(f"The checkpoint from host {self._host} is damaged: {damage}")
        shutil.rmtree(self._path, ignore_errors=True)  # half deleted, or it would not have been asked for
        self._draft.rename(self._path)
        folder.retain(self._path.parents[1], most, self._path)

    def _greeted(self, secret: str) -> Offer:
        """What it offers, once each has shown the other that it knows the secret. Raises OSError, BadOfferError."""
        ours = secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(ours)
        theirs, shown = self._read(NONCE_BYTES), self._read(PROOF_BYTES)
        if not hmac.compare_digest(shown, proof(secret, "lender", theirs, ours)):
            raise BadOfferError("a different host answered")
        self._socket.sendall(proof(secret, "borrower", theirs, ours))
        self._socket.settimeout(IDLE_S)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > OFFER_BYTES:
            raise BadOfferError(
                f"the list of checkpoint files has {length:,} bytes, more than the limit of {OFFER_BYTES:,}"
            )
        return decode(self._read(length))

    def _read(self, size: int) -> bytes:
        read = b""
        while len(read) < size:
            part = self._socket.recv(size - len(read))
            if not part:
                raise OSError("the connection was closed")
            read += part
        return read

    def _failed(self, error: Exception) -> UserError:
        return UserError(f"Host {self._host} could not send the checkpoint: {words_of(error)}")


def _told(path: Path) -> Loan:
    """Once the supervisor has left it.

    Raises:
        UserError: it does not.
    """
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            raise UserError(f"The host with the checkpoint did not answer within {PATIENCE_S:.0f} s")
        time.sleep(LOOK_S)
    try:
        return validate_loan(json.loads(path.read_text()))
    except (ValueError, BadMessageError) as error:
        raise UserError(f"The supervisor sent an invalid checkpoint offer: {error}") from None
