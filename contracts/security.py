"""Message signatures, secrets in files, and encrypted variables of a project.

Variables are encrypted (Fernet) with a key of one host and for one attempt. The database of the board, Redis and the
order on the disk of the host therefore hold no readable value.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

SIGNATURE_BYTES = 32
MAX_VARIABLES = 50  # per project
MAX_VARIABLE_NAME_CHARS = 100
MAX_VARIABLE_BYTES = 16 * 2**10  # per value, as UTF-8
MAX_VARIABLES_TOTAL_BYTES = 64 * 2**10  # all values of a project
# Variables of programs in a job. PATH, LD_*, PYTHON*, TORCH*, NCCL_*, PET_* and MASTER_* are left to the host, because
# they decide how a program is found, loaded, or meets its peers.
VARIABLE_NAME_PREFIXES = (
    *("JOB_", "HF_", "HUGGING_FACE_", "WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "CLEARML_"),
    *("AWS_", "AZURE_", "GOOGLE_", "S3_", "OPENAI_"),
)
VARIABLE_NAME_PATTERN = re.compile(rf"\A(?:{'|'.join(VARIABLE_NAME_PREFIXES)})[A-Z0-9_]*\Z")


class SecretError(RuntimeError):
    """A secret cannot be read from its file. The message never contains the secret."""


class DecryptionError(Exception):
    """The encrypted variables of an attempt cannot be used on this host."""


def sign(key: bytes, body: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message with the key of its sender."""
    return hmac.new(key, body, hashlib.sha256).digest()


def build_signed_entry(key: bytes, body: bytes) -> dict[str | bytes, bytes]:
    """Return the fields of an entry of `names.events_stream`."""
    return {"b": body, "s": sign(key, body)}


def prepend_signature(key: bytes, body: bytes) -> bytes:
    """Return the signature and the message as one string of bytes."""
    return sign(key, body) + body


def read_secret_file(name: str) -> str | None:
    """Read a secret from the file that the variable `NAME_FILE` names.

    A file keeps the secret out of `docker inspect` and `ps e`.

    Returns:
        The stripped text, or None if `NAME_FILE` is not set.

    Raises:
        SecretError: The file is empty or unreadable, or `NAME` is set as well.
    """
    path = os.environ.get(f"{name}_FILE", "")
    if not path:
        return None
    if os.environ.get(name):
        raise SecretError(f"{name} and {name}_FILE are both set. Unset one of them.")
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "not UTF-8 text")
        raise SecretError(f"{name}_FILE is {path!r}, which cannot be read: {reason}") from None
    if not text:
        raise SecretError(f"{name}_FILE is {path!r}, which is empty.")
    return text


def is_allowed_variable(name: str) -> bool:
    """Return True if a project may pass a variable of this name to its jobs."""
    return len(name) <= MAX_VARIABLE_NAME_CHARS and VARIABLE_NAME_PATTERN.match(name) is not None


def encrypt_variables(keys: Iterable[bytes], job: str, attempt: int, values: Mapping[str, str]) -> list[str]:
    """Encrypt the variables of an attempt once for each possible key of the host."""
    text = json.dumps({"job": job, "attempt": attempt, "values": dict(values)}).encode()
    return [_build_fernet(key).encrypt(text).decode() for key in keys]


def decrypt_variables(key: bytes, job: str, attempt: int, encrypted: Iterable[str]) -> dict[str, str]:
    """Decrypt the variables of an attempt.

    Raises:
        DecryptionError: None was encrypted for this host and attempt, or a name is not allowed.
    """
    for token in encrypted:
        try:
            content = json.loads(_build_fernet(key).decrypt(token))
        except InvalidToken:
            continue
        if (content["job"], content["attempt"]) != (job, attempt):
            raise DecryptionError("the variables were encrypted for another attempt")
        values: dict[str, str] = content["values"]
        if refused := sorted(name for name in values if not is_allowed_variable(name)):
            raise DecryptionError(f"this host does not pass the variable {refused[0]} to jobs")
        return values
    raise DecryptionError("no variable was encrypted with the key of this host")


def _build_fernet(key: bytes) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(hmac.new(key, b"meshboard.variables", hashlib.sha256).digest()))
