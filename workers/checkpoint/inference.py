"""Load the whole model of a checkpoint in one process, evaluate it, and sample text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from planner.facts.model_shapes import get_chunk_units
from planner.facts.placements import TensorBox
from planner.facts.spec import JobSpec
from workers.checkpoint.folder import list_candidates
from workers.checkpoint.load import find_undamaged, read_tensors
from workers.checkpoint.manifest import STEP
from workers.checkpoint.state import BoxedTensor
from workers.trainer.dataset import load_dataset, load_job_tokenizer
from workers.trainer.documents import TOKENS, get_suffix
from workers.trainer.errors import UserError
from workers.trainer.model import Decoder, Strategy, get_unit_parameter
from workers.trainer.model.decoder import get_full_name
from workers.trainer.parallel.document_mask import get_document_ids
from workers.trainer.tokenizer import Encoder, check_vocab_size, load_tokenizer, make_byte_encoder

NUM_BYTES = 256
INVALID_BYTE = b"\xff"  # invalid in UTF-8, shown as U+FFFD


def find_tokenizer(spec: JobSpec, path: Path | None, data_root: Path | None) -> Encoder | None:
    """Load the tokenizer at `path`, or the job's tokenizer below the data root. None if neither is known.

    Raises:
        UserError: if the file is missing or invalid, or has more tokens than the model.
    """
    if path is not None:
        encoder = load_tokenizer(path, f"`--tokenizer` {str(path)!r}")
    elif spec.train.tokenizer is not None and data_root is not None:
        encoder = load_job_tokenizer(data_root, spec.train.tokenizer)
    else:
        return None
    check_vocab_size(encoder, spec.model.vocab_size)
    return encoder


def get_text_encoder(spec: JobSpec, path: Path | None, data_root: Path | None) -> Encoder:
    """Return the encoder of the job: a tokenizer, or bytes.

    Raises:
        UserError: if the tokenizer is unknown or invalid.
    """
    if found := find_tokenizer(spec, path, data_root):
        return found
    train, size = spec.train, spec.model.vocab_size
    if train.tokenizer is not None:
        text = f"`--tokenizer` is missing, but the job uses the tokenizer {train.tokenizer!r} (`train.tokenizer`)."
        raise UserError(f"{text} Use --tokenizer PATH, or --data-root with the folder above the tokenizer.")
    if get_suffix(Path(train.data)) == TOKENS and size != NUM_BYTES:
        text = f"`--tokenizer` is missing, but the job reads tokens from {train.data!r} with a vocabulary of {size}."
        raise UserError(f"{text} Use the tokenizer that made the tokens.")
    return make_byte_encoder()


def encode_prompt(encoder: Encoder, prompt: str) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        UserError: if there are none.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("`--prompt` is not UTF-8.") from None
    (tokens,) = encoder.encode([prompt])
    if not tokens:
        raise UserError("`--prompt` has no tokens. Use at least one token.")
    return tokens


def decode_tokens(encoder: Encoder, tokens: list[int]) -> str:
    """Return the text of tokens, including special tokens. Invalid bytes become U+FFFD."""
    if encoder.tokenizer is None:
        found = b"".join(bytes([token]) if token < NUM_BYTES else INVALID_BYTE for token in tokens)
        return found.decode(errors="replace")
    return str(encoder.tokenizer.decode(tokens, skip_special_tokens=False))


class LoadedModel(NamedTuple):
    """Store a loaded model, and the spec and step of its checkpoint."""

    spec: JobSpec
    step: int
    decoder: Decoder


def load_model(path: Path, log: Callable[[str], None]) -> LoadedModel:
    """Load a checkpoint (job/attempt/step-n), or the newest undamaged checkpoint of a folder.

    Raises:
        UserError: if there is none.
    """
    path = path.resolve()
    root = path.parents[2] if STEP.fullmatch(path.name) and len(path.parents) > 2 else path.parent
    found = find_undamaged(list_candidates(root, str(path.relative_to(root))), None, log)
    manifest = found.manifest
    model = manifest.spec.model
    decoder = Decoder(model, range(model.num_layers), Strategy(), torch.float32, first=True, last=True)
    read_tensors(
        {f"model.{name}": _box_whole(tensor) for name, tensor in iter_named_tensors(manifest.spec, decoder)}, found
    )
    return LoadedModel(manifest.spec, manifest.step, decoder)


def iter_named_tensors(spec: JobSpec, decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the whole model, in order."""
    for unit in get_chunk_units(spec.model, range(spec.model.num_layers), first=True, last=True):
        for parameter in unit.parameters:
            yield get_full_name(unit, parameter), get_unit_parameter(decoder, unit, parameter).detach()


def _box_whole(tensor: torch.Tensor) -> BoxedTensor:
    shape = tuple(tensor.shape)
    return BoxedTensor(tensor, TensorBox((0,) * len(shape), shape), shape)


@torch.no_grad()
def evaluate(loaded: LoadedModel, data: str, data_root: Path, sequences: int) -> float:
    """Return the mean loss per token in nats, over held-out sequences as in a validation of the job."""
    train, model = loaded.spec.train, loaded.spec.model
    corpus = load_dataset(
        data, data_root, model.vocab_size, train.seq_len, column=train.column, tokenizer=train.tokenizer
    )
    total = 0.0
    for first in range(sequences):
        batch = corpus.eval_batch(train.seed, sequences, slice(first, first + 1), train.seq_len)
        rows = torch.from_numpy(batch)
        output = loaded.decoder(rows[:, :-1], get_document_ids(rows[:, :-1], train.document_end))
        total += float(loaded.decoder.loss_sum(output, rows[:, 1:]))
    return total / (sequences * train.seq_len)


@torch.no_grad()
def sample(loaded: LoadedModel, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Draw `count` tokens after `prompt` from softmax(logits / temperature). 0 takes the most probable token."""
    model = loaded.spec.model
    if not prompt or max(prompt) >= model.vocab_size:
        raise UserError(f"`--prompt` has a token outside the vocabulary. Use tokens below {model.vocab_size}.")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.max_seq_len :]])
        documents = get_document_ids(window, loaded.spec.train.document_end)
        logits = loaded.decoder(window, documents)[0, -1].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        probabilities = (logits / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]
