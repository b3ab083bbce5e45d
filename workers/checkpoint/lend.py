"""Send the newest checkpoint of a job once: `python -m workers.checkpoint.lend FD`.

FD is a listening socket. A line of JSON on stdin has the job's `folder`, the `secret`, and the time to wait for the
borrower (`wait_s`). The process stops at the end of stdin. Exit status 0 means that all files were sent.

The borrower sends a nonce. The lender answers with its own nonce and a proof that it knows the secret, and the borrower
sends its proof. Then the lender sends its `Offer`, preceded by its length in four bytes, and the files in the order of
`sizes`. The connection is not encrypted, because hosts of a training network trust each other.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import socket
import struct
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from workers.checkpoint import folder
from workers.checkpoint.folder import is_plain_file_name, open_regular
from workers.trainer.errors import UserError

NONCE_BYTES = PROOF_BYTES = 32
LENGTH = struct.Struct(">I")
MAX_OFFER_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20
IDLE_TIMEOUT_S = 60.0  # per chunk, on both sides
HANDSHAKE_TIMEOUT_S = 10.0  # for both proofs

NAME = re.compile(r"([0-9]{1,10})/step-([0-9]{8,18})")
MAX_UNAUTHENTICATED = 16  # connections without a proof, at the same time


class BadOfferError(ValueError):
    """Report an invalid offer."""


class Offer(NamedTuple):
    """Offer a checkpoint by attempt and step, with its file sizes, or state the problem. The manifest is last."""

    name: str
    sizes: dict[str, int]
    problem: str = ""


def compute_proof(secret: str, of: Literal["lender", "borrower"], lender: bytes, borrower: bytes) -> bytes:
    """Return the proof that a side knows the secret, for two nonces."""
    return hmac.digest(bytes.fromhex(secret), of.encode() + lender + borrower, "sha256")


def encode_offer(offer: Offer) -> bytes:
    body = json.dumps(offer._asdict()).encode()
    return LENGTH.pack(len(body)) + body


def decode_offer(body: bytes) -> Offer:
    """Decode and check an offer. Raises BadOfferError."""
    try:
        options = json.loads(body)
        offer = Offer(str(options["name"]), dict(options["sizes"]), str(options["problem"]))
    except (ValueError, TypeError, KeyError) as error:
        raise BadOfferError(f"the checkpoint offer is invalid: {error}") from None
    if offer.problem:
        return offer
    if not NAME.fullmatch(offer.name):
        raise BadOfferError(f"{offer.name[:100]!r} is not a checkpoint name")
    for name, size in offer.sizes.items():
        if not is_plain_file_name(name):
            raise BadOfferError(f"{name[:100]!r} is not a file name")
        if type(size) is not int or size < 0:
            raise BadOfferError(f"the size of {name} is {size!r}")
    return offer


class CheckpointSender:
    """Send one checkpoint to one borrower."""

    def __init__(self, job: Path, secret: str) -> None:
        self._job, self._secret = job, secret
        self._num_unauthenticated = 0
        self.is_started = False
        self.sent_all: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # true if all files were sent

    def stop(self) -> None:
        """Stop waiting for a borrower."""
        if not self.sent_all.done():
            self.sent_all.set_result(False)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        try:
            if await self._authenticate(reader, writer) and not self.is_started:
                self.is_started = True
                await self._send(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            print(f"a connection ended early: {error!r}", file=sys.stderr)
        finally:
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self._num_unauthenticated >= MAX_UNAUTHENTICATED:
            return False
        self._num_unauthenticated += 1
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                borrower_nonce, own_nonce = await reader.readexactly(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
                writer.write(own_nonce + compute_proof(self._secret, "lender", own_nonce, borrower_nonce))
                borrower_proof = await reader.readexactly(PROOF_BYTES)
            return hmac.compare_digest(
                borrower_proof, compute_proof(self._secret, "borrower", own_nonce, borrower_nonce)
            )
        finally:
            self._num_unauthenticated -= 1

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            offer = make_offer(self._job)
            writer.write(encode_offer(offer))
            for name, size in offer.sizes.items():
                await _send_file(self._job / offer.name / name, size, writer)
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await reader.read(1)  # The borrower closes the connection at the end.
            if not offer.problem and not self.sent_all.done():
                self.sent_all.set_result(True)
        finally:
            self.stop()


def make_offer(job: Path) -> Offer:
    """Offer the newest complete checkpoint of a job."""
    checkpoints = folder.list_complete(job)
    if not checkpoints:
        return Offer("", {}, "this host has no complete checkpoint of the job")
    path = checkpoints[-1].path
    try:
        return Offer(str(path.relative_to(job)), folder.get_file_sizes(path))
    except (UserError, OSError) as error:
        return Offer("", {}, str(error))


async def _send_file(path: Path, size: int, writer: asyncio.StreamWriter) -> None:
    """Send a file, and raise an `OSError` if it is shorter than offered."""
    with open(path, "rb", opener=open_regular) as file:
        while size:
            part = file.read(min(CHUNK_BYTES, size))
            if not part:
                raise OSError(f"{size:,} bytes of {path.name} are missing")
            size -= len(part)
            writer.write(part)
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await writer.drain()


async def lend(listener: socket.socket, job: Path, secret: str, wait_s: float) -> bool:
    """Send the newest checkpoint, and return whether all files were sent."""
    lending, loop = CheckpointSender(job, secret), asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lending.stop)
    loop.call_later(wait_s, lambda: None if lending.is_started else lending.stop())
    async with await asyncio.start_server(lending.serve, sock=listener):
        return await lending.sent_all


def main() -> int:
    options = json.loads(sys.stdin.buffer.readline())
    listener = socket.socket(fileno=int(sys.argv[1]))
    return 0 if asyncio.run(lend(listener, Path(options["folder"]), options["secret"], options["wait_s"])) else 1


if __name__ == "__main__":
    sys.exit(main())
