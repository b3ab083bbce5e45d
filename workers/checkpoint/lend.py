"""What passes between who lends a checkpoint and who borrows it, on one connection.

The borrower sends a nonce; the lender answers with one of its own and the proof that it knows the loan's secret; the
borrower proves the same. Then the lender sends its `Offer`, after four bytes with its length, and the files one after
the other in the order of `sizes`. Neither is encrypted: a network that hosts train on is trusted that far.

`python -m workers.checkpoint.lend FD`: send the newest checkpoint of a job to who knows a secret, once.

FD listens. A line of JSON on stdin has the job's `folder`, the `secret` and how many seconds to wait for the borrower
(`wait_s`); the end of stdin ends us. Exit status 0: all of it was sent.
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
from workers.checkpoint.manifest import is_plain, regular
from workers.trainer.errors import UserError

NONCE_BYTES = PROOF_BYTES = 32
LENGTH = struct.Struct(">I")
OFFER_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20
IDLE_S = 60.0  # so long neither side waits for the other to send or take a chunk
GREETING_S = 10.0  # for the proofs

NAME = re.compile(r"([0-9]{1,10})/step-([0-9]{8,18})")


class BadOfferError(ValueError):
    """It makes no sense; says how."""


class Offer(NamedTuple):
    """A checkpoint by attempt and step, and its files' bytes, the manifest last; or why there is none."""

    name: str
    sizes: dict[str, int]
    problem: str = ""


def proof(secret: str, of: Literal["lender", "borrower"], lender: bytes, borrower: bytes) -> bytes:
    """That a side knows the secret, for these two nonces alone."""
    return hmac.digest(bytes.fromhex(secret), of.encode() + lender + borrower, "sha256")


def encode(offer: Offer) -> bytes:
    body = json.dumps(offer._asdict()).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Offer:
    """
    Raises:
        BadOfferError: it is none, or a file of it would lie elsewhere than in its folder.
    """
    try:
        told = json.loads(body)
        offer = Offer(str(told["name"]), dict(told["sizes"]), str(told["problem"]))
    except (ValueError, TypeError, KeyError) as error:
        raise BadOfferError(f"the checkpoint offer is invalid: {error}") from None
    if offer.problem:
        return offer
    if not NAME.fullmatch(offer.name):
        raise BadOfferError(f"{offer.name[:100]!r} is not a checkpoint name")
    for name, size in offer.sizes.items():
        if not is_plain(name):
            raise BadOfferError(f"{name[:100]!r} is not a file name")
        if type(size) is not int or size < 0:
            raise BadOfferError(f"the size of {name} is {size!r}")
    return offer


MOST_STRANGERS = 16  # at a time: who have not shown yet that they know the secret


class Lending:
    """One checkpoint, for one borrower."""

    def __init__(self, job: Path, secret: str) -> None:
        self._job, self._secret = job, secret
        self._strangers = 0
        self._taken = False
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether all of it was sent

    def end(self) -> None:
        """Nobody wants it any more."""
        if not self.over.done():
            self.over.set_result(False)

    def end_unless_taken(self) -> None:
        if not self._taken:
            self.end()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection."""
        try:
            if await self._is_the_borrower(reader, writer) and not self._taken:
                self._taken = True
                await self._send(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            print(f"a connection ended early: {error!r}", file=sys.stderr)
        finally:
            writer.close()

    async def _is_the_borrower(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self._strangers >= MOST_STRANGERS:
            return False
        self._strangers += 1
        try:
            async with asyncio.timeout(GREETING_S):
                theirs, ours = await reader.readexactly(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
                writer.write(ours + proof(self._secret, "lender", ours, theirs))
                shown = await reader.readexactly(PROOF_BYTES)
            return hmac.compare_digest(shown, proof(self._secret, "borrower", ours, theirs))
        finally:
            self._strangers -= 1

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            offer = offer_of(self._job)
            writer.write(encode(offer))
            for name, size in offer.sizes.items():
                await _send_file(self._job / offer.name / name, size, writer)
            async with asyncio.timeout(IDLE_S):
                await reader.read(1)  # it hangs up when it has all
            if not offer.problem and not self.over.done():
                self.over.set_result(True)
        finally:
            self.end()


def offer_of(job: Path) -> Offer:
    """The newest that is complete."""
    found = folder.complete_below(job)
    if not found:
        return Offer("", {}, "this host has no complete checkpoint of the job")
    path = found[-1].path
    try:
        return Offer(str(path.relative_to(job)), folder.sizes(path))
    except (UserError, OSError) as error:
        return Offer("", {}, str(error))


async def _send_file(path: Path, size: int, writer: asyncio.StreamWriter) -> None:
    """Raises OSError where it holds less: what was promised cannot be kept."""
    with open(path, "rb", opener=regular) as file:
        while size:
            part = file.read(min(CHUNK_BYTES, size))
            if not part:
                raise OSError(f"{size:,} bytes of {path.name} are missing")
            size -= len(part)
            writer.write(part)
            async with asyncio.timeout(IDLE_S):
                await writer.drain()


async def lend(door: socket.socket, job: Path, secret: str, wait_s: float) -> bool:
    """Whether somebody borrowed all of it."""
    lending, loop = Lending(job, secret), asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lending.end)
    loop.call_later(wait_s, lending.end_unless_taken)
    async with await asyncio.start_server(lending.serve, sock=door):
        return await lending.over


def main() -> int:
    told = json.loads(sys.stdin.buffer.readline())
    door = socket.socket(fileno=int(sys.argv[1]))
    return 0 if asyncio.run(lend(door, Path(told["folder"]), told["secret"], told["wait_s"])) else 1


if __name__ == "__main__":
    sys.exit(main())
