"""What passes between who lends a checkpoint and who borrows it, on one connection.

The borrower sends a nonce; the lender answers with one of its own and the proof that it knows the loan's secret; the
borrower proves the same. Then the lender sends its `Offer`, after four bytes with its length, and the files one after
the other in the order of `sizes`. Neither is encrypted: a network that hosts train on is trusted that far.
"""

from __future__ import annotations

import hmac
import json
import re
import struct
from typing import Literal, NamedTuple

from workers.checkpoint.files import is_plain

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
