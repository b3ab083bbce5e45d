"""Text in and out of a checkpoint's model, by the tokenizer that its job was trained with.

A checkpoint's whole model in one process: to look at, to evaluate, to sample from, to hand on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from planner.facts.model_shapes import get_chunk_units
from planner.facts.placements import TensorBox
from planner.facts.spec import JobSpec
from workers.checkpoint.folder import candidates
from workers.checkpoint.load import first_whole, read
from workers.checkpoint.manifest import STEP
from workers.checkpoint.state import Boxed
from workers.trainer.dataset import load_corpus, tokenizer_of
from workers.trainer.documents import TOKENS, kind_of
from workers.trainer.errors import UserError
from workers.trainer.model import Decoder, Strategy, unit_parameter
from workers.trainer.model.decoder import full_name
from workers.trainer.parallel.document_mask import documents_of
from workers.trainer.tokenizer import Encoder, byte_encoder, check_size, load_tokenizer

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


class Whole(NamedTuple):
    """`spec` is the job's that wrote it."""

    spec: JobSpec
    step: int
    decoder: Decoder


def load_whole(path: Path, say: Callable[[str], None]) -> Whole:
    """Load a checkpoint (job/attempt/step-n), or the newest whole one of a folder of them.

    Raises:
        UserError: when there is none.
    """
    path = path.resolve()
    root = path.parents[2] if STEP.fullmatch(path.name) and len(path.parents) > 2 else path.parent
    found = first_whole(candidates(root, str(path.relative_to(root))), None, say)
    manifest = found.manifest
    model = manifest.spec.model
    decoder = Decoder(model, range(model.num_layers), Strategy(), torch.float32, first=True, last=True)
    read({f"model.{name}": _all_of(tensor) for name, tensor in named_tensors(manifest.spec, decoder)}, found)
    return Whole(manifest.spec, manifest.step, decoder)


def named_tensors(spec: JobSpec, decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the whole model, tensor) of everything, in order."""
    for unit in get_chunk_units(spec.model, range(spec.model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield full_name(unit, parameter), unit_parameter(decoder, unit, parameter).detach()


def _all_of(tensor: torch.Tensor) -> Boxed:
    shape = tuple(tensor.shape)
    return Boxed(tensor, TensorBox((0,) * len(shape), shape), shape)


@torch.no_grad()
def evaluate(whole: Whole, data: str, data_root: Path, sequences: int) -> float:
    """Mean loss in nats a token over held-out sequences of `data`, those a validation of the job would draw first."""
    train, model = whole.spec.train, whole.spec.model
    corpus = load_corpus(
        data, data_root, model.vocab_size, train.seq_len, column=train.column, tokenizer=train.tokenizer
    )
    total = 0.0
    for first in range(sequences):
        batch = corpus.eval_batch(train.seed, sequences, slice(first, first + 1), train.seq_len)
        rows = torch.from_numpy(batch)
        output = whole.decoder(rows[:, :-1], documents_of(rows[:, :-1], train.document_end))
        total += float(whole.decoder.loss_sum(output, rows[:, 1:]))
    return total / (sequences * train.seq_len)


@torch.no_grad()
def sample(whole: Whole, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """`count` tokens after `prompt`, each drawn from softmax(logits / temperature); the likeliest at 0."""
    model = whole.spec.model
    if not prompt or max(prompt) >= model.vocab_size:
        raise UserError(f"`--prompt` has a token outside the vocabulary. Use tokens below {model.vocab_size}.")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.max_seq_len :]])
        documents = documents_of(window, whole.spec.train.document_end)
        logits = whole.decoder(window, documents)[0, -1].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        probabilities = (logits / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]
