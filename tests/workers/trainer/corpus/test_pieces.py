"""A document in pieces is the same text, and the tokenizers in use make the same tokens of it."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from workers.trainer.corpus import pieces as cutting
from workers.trainer.corpus.pieces import blocks, pieces

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}
ALPHABET = ["ab", "c", "7", "42", ";", "'s", "(", "\u00e9", "\u6587", " ", " ", "  ", "\t", "\n", "\n", "\n\n", "\r\n"]


def text_of(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(ALPHABET) for _ in range(3000))


def tokenizer_of(pattern: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text_of(seed) for seed in range(5)],
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    return made


@pytest.mark.parametrize("name", list(PATTERNS))
def test_cutting_changes_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE_CHARS", 400)
    tokenizer = tokenizer_of(PATTERNS[name])
    for seed in range(10, 40):
        text = text_of(seed)
        found = [piece.text for piece in pieces([text])]
        assert len(found) > 10
        encoded = [token for piece in found for token in tokenizer.encode(piece).ids]
        assert encoded == tokenizer.encode(text).ids


def test_the_pieces_are_bounded_and_do_not_depend_on_how_the_text_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE_CHARS", 100)
    for text in (text_of(1), "x" * 1001, "\n" * 777, "a" * 99 + "\nb", ""):
        found = list(pieces([text]))
        assert "".join(piece.text for piece in found) == text
        assert max(len(piece.text) for piece in found) <= 100
        assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
        assert list(pieces(blocks(text))) == list(pieces(text)) == found
