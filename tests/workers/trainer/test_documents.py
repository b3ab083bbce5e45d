"""Documents are split without changes to tokens, and read from JSONL, Parquet, and text files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from workers.trainer import documents as cutting
from workers.trainer.dataset import load_dataset
from workers.trainer.documents import iter_blocks, split_document
from workers.trainer.errors import UserError

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}
ALPHABET = ["ab", "c", "7", "42", ";", "'s", "(", "\u00e9", "\u6587", " ", " ", "  ", "\t", "\n", "\n", "\n\n", "\r\n"]
ROOT = Path(__file__).resolve().parents[3]
TEXTS = [f"def f{i}(x):\n    return x + {i} \u00e9" for i in range(400)]
SEQ_LEN = 16


def read_text(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(ALPHABET) for _ in range(3000))


def load_job_tokenizer(pattern: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [read_text(seed) for seed in range(5)],
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    return made


@pytest.mark.parametrize("name", list(PATTERNS))
def test_splitting_does_not_change_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MAX_PIECE_CHARS", 400)
    tokenizer = load_job_tokenizer(PATTERNS[name])
    for seed in range(10, 40):
        text = read_text(seed)
        found = [piece.text for piece in split_document([text])]
        assert len(found) > 10
        encoded = [token for piece in found for token in tokenizer.encode(piece).ids]
        assert encoded == tokenizer.encode(text).ids


def test_pieces_are_bounded_and_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MAX_PIECE_CHARS", 100)
    for text in (read_text(1), "x" * 1001, "\n" * 777, "a" * 99 + "\nb", ""):
        found = list(split_document([text]))
        assert "".join(piece.text for piece in found) == text
        assert max(len(piece.text) for piece in found) <= 100
        assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
        assert list(split_document(iter_blocks(text))) == list(split_document(text)) == found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)))
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=64)
    (tmp_path / "d.txt").write_text("\n".join(TEXTS))
    return tmp_path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "workers.tokenizer", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def tokenizer(root: Path) -> Tokenizer:
    made = command("train", str(root / "d.jsonl"), "--vocab-size", "300", "--out", str(root / "bpe.json"))
    assert made.returncode == 0, made.stderr
    assert "300 tokens" in made.stdout
    return Tokenizer.from_file(str(root / "bpe.json"))


def tokens(root: Path, data: str, vocab: int = 256, **more: str) -> list[int]:
    corpus = load_dataset(data, root, vocab, SEQ_LEN, **more)  # type: ignore[arg-type]
    return [*corpus.train.tolist(), *corpus.held_out.tolist()]


@pytest.mark.parametrize("data", ["d.jsonl", "d.parquet"])
def test_separates_documents_of_bytes_with_a_newline(root: Path, data: str) -> None:
    assert bytes(tokens(root, data)).decode() == "".join(f"{text}\n" for text in TEXTS)


@pytest.mark.parametrize("data", ["d.jsonl", "d.parquet"])
def test_separates_documents_of_tokens_with_end_of_text(root: Path, tokenizer: Tokenizer, data: str) -> None:
    found = tokens(root, data, 300, tokenizer="bpe.json")
    end = tokenizer.token_to_id("<|endoftext|>")
    assert found.count(end) == len(TEXTS)
    assert tokenizer.decode(found, skip_special_tokens=False) == "".join(f"{t}<|endoftext|>" for t in TEXTS)
    assert len(found) < sum(len(text.encode()) for text in TEXTS) / 2


def test_encodes_plain_text_and_the_default_data(root: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokens(root, "d.txt", 300, tokenizer="bpe.json")) == "\n".join(TEXTS)
    source = tokenizer.decode(tokens(root, "stdlib", 300, tokenizer="bpe.json")[:2000])
    assert "import" in source


def test_encodes_again_after_the_file_changes(root: Path) -> None:
    tokens(root, "d.jsonl")
    (cached,) = (root / ".cache").rglob("*.u8")
    before = cached.stat().st_mtime_ns
    tokens(root, "d.jsonl")
    assert cached.stat().st_mtime_ns == before
    with (root / "d.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert bytes(tokens(root, "d.jsonl")).decode().endswith("one more\n")
    assert not list((root / ".cache").rglob("*.new"))


def test_encode_writes_a_token_file_for_training(root: Path, tokenizer: Tokenizer) -> None:
    out = root / "d.bin"
    done = command("encode", str(root / "d.parquet"), "--tokenizer", str(root / "bpe.json"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert np.fromfile(out, dtype=np.uint16).tolist() == tokens(root, "d.jsonl", 300, tokenizer="bpe.json")
    assert tokens(root, "d.bin", 300) == tokens(root, "d.jsonl", 300, tokenizer="bpe.json")


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', {}, "`train.data`: x.jsonl line 2 is not JSON"),
        (
            "x.jsonl",
            b'{"body": "a", "id": 1}\n',
            {},
            "`train.column` is 'text', but x.jsonl line 1 has body, id.",
        ),
        ("x.jsonl", b'{"text": 3}\n', {}, "line 1 has a number there instead of text."),
        ("x.parquet", b"PAR1 and no more", {}, "`train.data`: x.parquet cannot be read as parquet"),
        ("x.txt", b"\xff\xfe", {"tokenizer": "bpe.json"}, "`train.data`: x.txt line 1 is not UTF-8"),
        ("bad.json", b"{}", {"tokenizer": "bad.json"}, "`train.tokenizer` 'bad.json' is not tokenizers JSON"),
        (
            "x.txt",
            b"a",
            {"tokenizer": "none.json"},
            "`train.tokenizer` is 'none.json', which does not exist below the data root",
        ),
        (
            "x.txt",
            b"a",
            {"tokenizer": "../bpe.json"},
            "`train.tokenizer` is '../bpe.json', which is outside the data root",
        ),
    ],
)
def test_errors_name_the_file_and_the_line(
    root: Path, tokenizer: Tokenizer, name: str, content: bytes, more: dict[str, str], words: str
) -> None:
    (root / name).write_bytes(content)
    with pytest.raises(UserError) as result:
        load_dataset(name, root, 300, SEQ_LEN, **more)  # type: ignore[arg-type]
    assert words in str(result.value)
    assert not list((root / ".cache").rglob("*.u8")), "nothing half written is kept"


def test_explains_a_wrong_column_and_a_small_vocabulary(root: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        UserError, match=r"`train.column` is 'body', but d.parquet has no column of that name: id, text"
    ):
        load_dataset("d.parquet", root, 256, SEQ_LEN, column="body")
    with pytest.raises(UserError, match=r"'bpe.json' has 300 tokens, more than the vocab_size 256"):
        load_dataset("d.jsonl", root, 256, SEQ_LEN, tokenizer="bpe.json")


def test_the_command_rejects_in_one_line(tmp_path: Path) -> None:
    small = command("train", str(ROOT / "README.md"), "--vocab-size", "10", "--out", str(tmp_path / "t.json"))
    assert (small.returncode, small.stderr.count("\n")) == (2, 1)
    assert "Use at least 257" in small.stderr
    large = command("train", str(ROOT / "README.md"), "--vocab-size", "9" * 12, "--out", str(tmp_path / "t.json"))
    assert "`--vocab-size` is 999,999,999,999. Use at most 4,194,304." in large.stderr
    none = command("encode", str(tmp_path / "none"), "--tokenizer", "t.json", "--out", str(tmp_path / "x.bin"))
    assert "error: `inputs` has" in none.stderr
    assert not list(tmp_path.iterdir())
