"""Variables that a project hands its jobs: which names there may be, and how they travel to a host.

Sealed (Fernet, of `cryptography`) with a key of that host's own, for one attempt: neither the board's database, nor
Redis, nor the order on the host's disk holds a value that can be read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping

from cryptography.fernet import Fernet, InvalidToken

MOST = 50  # of a project
LONGEST_NAME = 100
MOST_BYTES = 16 * 2**10  # of a value, as UTF-8
ALL_BYTES = 64 * 2**10  # of all values of a project
# What programs of a job read, and nothing that says how a program is found, loaded, or meets its peers: PATH, LD_*,
# PYTHON*, TORCH*, NCCL_*, PET_* and MASTER_* are the host's alone.
PREFIXES = (
    *("JOB_", "HF_", "HUGGING_FACE_", "WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "CLEARML_"),
    *("AWS_", "AZURE_", "GOOGLE_", "S3_", "OPENAI_"),
)
NAME = re.compile(rf"\A(?:{'|'.join(PREFIXES)})[A-Z0-9_]*\Z")


class SealError(Exception):
    """What was sealed cannot be opened here."""


def is_allowed(name: str) -> bool:
    """Whether jobs may be handed a variable of this name."""
    return len(name) <= LONGEST_NAME and NAME.match(name) is not None


def seal(keys: Iterable[bytes], job: str, attempt: int, values: Mapping[str, str]) -> list[str]:
    """Once for each key that the host may have."""
    told = json.dumps({"job": job, "attempt": attempt, "values": dict(values)}).encode()
    return [_fernet(key).encrypt(told).decode() for key in keys]


def unseal(key: bytes, job: str, attempt: int, sealed: Iterable[str]) -> dict[str, str]:
    """The variables of an attempt.

    Raises:
        SealError: none was sealed for this host and attempt, or a name is not allowed.
    """
    for text in sealed:
        try:
            told = json.loads(_fernet(key).decrypt(text))
        except InvalidToken:
            continue
        if (told["job"], told["attempt"]) != (job, attempt):
            raise SealError("the variables were encrypted for another attempt")
        values: dict[str, str] = told["values"]
        if refused := sorted(name for name in values if not is_allowed(name)):
            raise SealError(f"this host does not pass the variable {refused[0]} to jobs")
        return values
    raise SealError("no variable was encrypted with the key of this host")


def _fernet(key: bytes) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(hmac.new(key, b"meshboard.variables", hashlib.sha256).digest()))
