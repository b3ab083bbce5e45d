"""`python -m workers.tokenizer`: train a byte-level BPE tokenizer, and encode text with a tokenizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workers.disk import open_draft
from workers.trainer.documents import END_OF_TEXT, load_tokenizer, read_documents, write_tokens
from workers.trainer.errors import UserError, abbreviate

MIN_VOCAB_SIZE = 257  # all bytes, and END_OF_TEXT
MAX_VOCAB_SIZE = 4_194_304  # more than any model has; the trainer allocates all of them at its start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.tokenizer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("train", help="train a byte-level BPE tokenizer and write a tokenizers JSON file")
    trained.add_argument("inputs", nargs="+", type=Path, help="text, JSONL or parquet files, or folders of text")
    trained.add_argument("--vocab-size", type=int, required=True)
    encoded = commands.add_parser("encode", help="encode a text file or folder as a .bin file of uint16 tokens")
    encoded.add_argument("inputs", nargs=1, type=Path)
    encoded.add_argument("--tokenizer", type=Path, required=True)
    for command in (trained, encoded):
        command.add_argument("--column", default="text", help="name of the text column in JSONL or parquet files")
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        _check_inputs(options.inputs)
        print(_train(options) if options.command == "train" else _encode(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: `--out` is {str(options.out)!r}, which cannot be written: {error.strerror or error}",
            file=sys.stderr,
        )
        return 2
    return 0


def _check_inputs(paths: list[Path]) -> None:
    for path in paths:
        try:
            is_usable = path.is_file() or path.is_dir()  # reading a FIFO would block
            exists = is_usable or path.exists()
        except OSError as error:
            raise UserError(f"`inputs` has {abbreviate(str(path))}, which cannot be read: {error.strerror}") from None
        if not exists:
            raise UserError(f"`inputs` has {abbreviate(str(path))}, which does not exist.")
        if not is_usable:
            raise UserError(f"`inputs` has {str(path)!r}. Use regular files or folders.")


def _train(options: argparse.Namespace) -> str:
    if options.vocab_size < MIN_VOCAB_SIZE:
        text = f"Use at least {MIN_VOCAB_SIZE}, one token for each byte and one for {END_OF_TEXT}."
        raise UserError(f"`--vocab-size` is {options.vocab_size}. {text}")
    if options.vocab_size > MAX_VOCAB_SIZE:
        raise UserError(f"`--vocab-size` is {options.vocab_size:,}. Use at most {MAX_VOCAB_SIZE:,}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_read_texts(options.inputs, options.column), trainer)
    with open_draft(options.out) as draft:
        draft.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return f"{options.out}: {tokenizer.get_vocab_size()} tokens"


def _encode(options: argparse.Namespace) -> str:
    encoder = load_tokenizer(options.tokenizer, f"`--tokenizer` {str(options.tokenizer)!r}")
    if encoder.dtype != np.dtype(np.uint16):
        raise UserError("`--tokenizer` has token ids above 65,535, which do not fit into uint16.")
    with open_draft(options.out) as draft, draft.open("wb") as out:
        write_tokens(options.inputs[0], encoder, options.column, out)
        count = out.tell() // encoder.dtype.itemsize
    return f"{options.out}: {count:,} tokens"


def _read_texts(paths: list[Path], column: str) -> Iterator[str]:
    for path in paths:
        yield from (piece.text for piece in read_documents(path, column))


if __name__ == "__main__":
    sys.exit(main())
