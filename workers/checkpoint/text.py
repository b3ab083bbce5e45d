"""Text in and out of a checkpoint's model, by the tokenizer that its job was trained with."""

from __future__ import annotations

from pathlib import Path

from planner.facts.spec import JobSpec
from workers.trainer.corpus.data import tokenizer_of
from workers.trainer.corpus.encode import Encoder, byte_encoder, check_size, load_tokenizer
from workers.trainer.corpus.text import TOKENS, kind_of
from workers.trainer.errors import UserError

BYTES = 256
NO_BYTE = b"\xff"  # no text has it: it is shown as U+FFFD


def find_tokenizer(spec: JobSpec, given: Path | None, data_root: Path | None) -> Encoder | None:
    """The tokenizer `given`, else the job's own below the data root. None when neither is known.

    Raises:
        UserError: missing, no tokenizer, or of more tokens than the model has.
    """
    if given is not None:
        encoder = load_tokenizer(given, f"`--tokenizer` {str(given)!r}")
    elif spec.train.tokenizer is not None and data_root is not None:
        encoder = tokenizer_of(data_root, spec.train.tokenizer)
    else:
        return None
    check_size(encoder, spec.model.vocab_size)
    return encoder


def text_encoder(spec: JobSpec, given: Path | None, data_root: Path | None) -> Encoder:
    """What turns text into the tokens that the job's model knows: bytes when it was trained on bytes.

    Raises:
        UserError: as `find_tokenizer`, and when there is a tokenizer but it is not known where.
    """
    if found := find_tokenizer(spec, given, data_root):
        return found
    train, size = spec.train, spec.model.vocab_size
    if train.tokenizer is not None:
        text = f"`--tokenizer` is missing, but the job uses the tokenizer {train.tokenizer!r} (`train.tokenizer`)."
        raise UserError(f"{text} Use --tokenizer PATH, or --data-root with the folder above the tokenizer.")
    if kind_of(Path(train.data)) == TOKENS and size != BYTES:
        text = f"`--tokenizer` is missing, but the job reads tokens from {train.data!r} with a vocabulary of {size}."
        raise UserError(f"{text} Use the tokenizer that made the tokens.")
    return byte_encoder()


def encode_prompt(encoder: Encoder, prompt: str) -> list[int]:
    """Tokens of a prompt.

    Raises:
        UserError: when it has none.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("`--prompt` is not UTF-8.") from None
    (tokens,) = encoder.encode([prompt])
    if not tokens:
        raise UserError("`--prompt` has no tokens. Use at least one token.")
    return tokens


def decode(encoder: Encoder, tokens: list[int]) -> str:
    """The text of tokens, special ones too; what is no text is U+FFFD in bytes."""
    if encoder.tokenizer is None:
        found = b"".join(bytes([token]) if token < BYTES else NO_BYTE for token in tokens)
        return found.decode(errors="replace")
    return str(encoder.tokenizer.decode(tokens, skip_special_tokens=False))
