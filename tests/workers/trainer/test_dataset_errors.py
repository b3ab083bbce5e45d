"""Data that is broken, odd or hostile ends in one clear error, or in what the documents say; nothing waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.trainer.dataset import load_corpus
from workers.trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SEQ_LEN = 4
LINES = [f"line {i} of \u00e9\n" for i in range(200)]
TOO_LONG = "x" * 300


def tokens(root: Path, data: str, vocab: int = 300, **more: Any) -> list[int]:
    corpus = load_corpus(data, root, vocab, SEQ_LEN, **more)
    return [*corpus.train.tolist(), *corpus.held_out.tolist()]


def byte_tokenizer(**bpe: Any) -> Tokenizer:
    """Every byte a token, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, [], **bpe))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return made


def told(root: Path, data: str, **more: Any) -> str:
    """The one line that comes instead of a traceback; no draft is left behind."""
    with pytest.raises(UserError) as error:
        tokens(root, data, **more)
    assert not list((root / ".cache").rglob("*.new"))
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a\\ud800"}', "`train.data`: x.jsonl line 2 has \\ud800 in 'text', which is an incomplete"),
        (b"[" * 200_000, "`train.data`: x.jsonl line 2 is JSON that is nested too deeply"),
        (b'{"text": "\xff"}', "`train.data`: x.jsonl line 2 is not JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "`train.data`: x.jsonl line 2 is not JSON"),
        (b'["text"]', "`train.column` is 'text', but x.jsonl line 2 is a list instead of a JSON object."),
        (b'{"text": null}', "`train.column` is 'text', but x.jsonl line 2 has a null there instead of text."),
        (b"{}", "`train.column` is 'text', but x.jsonl line 2 has nothing."),
        (b'{"\\ud800": 1}', "line 2 has \\ud800."),
        (json.dumps({f"key{i:05}": i for i in range(10_000)}).encode(), "has key00000, key00001"),
    ],
)
def test_a_broken_line_is_told_by_its_number(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    message = told(tmp_path, "x.jsonl")
    assert words in message
    assert len(message) < 400
    message.encode()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (TOO_LONG, "'xxx"),
        ("a\0b", "'a\\x00b', which is not a valid file name"),
        ("a\ud800b", "'a\\ud800b', which is not a valid file name"),
        ("loop", "'loop'"),
        ("a/../../b", "is outside the data root"),
    ],
)
@pytest.mark.parametrize("field", ["data", "tokenizer"])
def test_a_name_that_is_none_is_told_by_its_field(tmp_path: Path, field: str, name: str, words: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "x.txt").write_text("".join(LINES))
    message = told(tmp_path, **{"data": "x.txt", field: name})
    assert message.startswith(f"`train.{field}` is ")
    assert words in message
    assert len(message) < 300


@pytest.mark.parametrize("name", ["pipe", "folder"])
def test_a_tokenizer_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert told(tmp_path, "x.txt", tokenizer=name) == f"`train.tokenizer` '{name}' is not a regular file"


@pytest.mark.parametrize(
    ("inputs", "tokenizer", "out", "words"),
    [
        ("pipe", "t.json", "x.bin", "`inputs` has '{}/pipe'. Use regular files or folders."),
        ("x.txt", "/dev/zero", "x.bin", "`--tokenizer` '/dev/zero' is not a regular file"),
        (
            "x.txt",
            "t.json",
            "none/x.bin",
            "`--out` is '{}/none/x.bin', which cannot be written: No such file or directory",
        ),
        ("bad.txt", "t.json", "x.bin", "`train.data`: bad.txt line 2 is not UTF-8: invalid start byte"),
        (TOO_LONG, "t.json", "x.bin", "characters), which cannot be read: File name too long"),
    ],
)
def test_the_command_tells_the_same_and_leaves_nothing(
    tmp_path: Path, inputs: str, tokenizer: str, out: str, words: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.txt").write_text("".join(LINES))
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff")
    byte_tokenizer().save(str(tmp_path / "t.json"))
    before = set(tmp_path.iterdir())
    argv = ["encode", str(tmp_path / inputs), "--tokenizer", str(tmp_path / tokenizer), "--out", str(tmp_path / out)]
    done = subprocess.run(
        [sys.executable, "-m", "workers.tokenizer", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words.format(tmp_path) in done.stderr
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b'{"model": {"type": "BPE"', b"\xff\xfe", b"{" * 100_000])
def test_what_is_no_tokenizer_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    (tmp_path / "t.json").write_bytes(content)
    assert "`train.tokenizer` 't.json' is not tokenizers JSON: " in told(tmp_path, "x.txt", tokenizer="t.json")


def test_a_text_that_a_tokenizer_has_no_token_for_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    made = Tokenizer(models.WordLevel({"line": 0}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    assert "`train.tokenizer` 't.json' cannot encode a text: WordLevel" in told(tmp_path, "x.txt", tokenizer="t.json")


def test_a_tokenizer_whose_numbers_have_gaps_is_measured_by_its_largest(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    made = Tokenizer(models.WordLevel({"line": 0, "[UNK]": 5000}, unk_token="[UNK]"))
    made.save(str(tmp_path / "t.json"))
    assert "'t.json' has 5001 tokens, more than the vocab_size 300" in told(tmp_path, "x.txt", tokenizer="t.json")


def test_truncation_padding_and_dropout_of_a_tokenizer_lose_and_add_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    plain, odd = byte_tokenizer(), byte_tokenizer(dropout=0.9)
    odd.enable_truncation(3)
    odd.enable_padding(length=100)
    plain.save(str(tmp_path / "plain.json"))
    odd.save(str(tmp_path / "odd.json"))
    found = tokens(tmp_path, "x.jsonl", tokenizer="odd.json")
    assert found == tokens(tmp_path, "x.jsonl", tokenizer="plain.json")
    assert plain.decode(found, skip_special_tokens=False) == "".join(f"{line}<|endoftext|>" for line in LINES)


def test_a_folder_is_one_document_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (folder / "a.txt").write_text("".join(LINES))
    (folder / "b").write_text("no line end")
    (folder / "c.JSONL").write_text('{"text": "row 1"}\n{"text": "row 2"}')
    os.mkfifo(folder / "pipe")
    raw = "".join(f"{text}\n" for text in ("".join(LINES), "no line end", "row 1", "row 2"))
    assert bytes(tokens(tmp_path, "texts")).decode() == raw
    end = "<|endoftext|>"
    encoded = tokens(tmp_path, "texts", tokenizer="t.json")
    text = byte_tokenizer().decode(encoded, skip_special_tokens=False)
    assert text == f"{''.join(LINES)}{end}no line end{end}row 1{end}row 2{end}"


def test_bytes_are_taken_as_they_stand_from_a_folder_as_from_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "latin.bin"
    folder.mkdir()
    raw = "caf\u00e9 cr\u00e8me\r\n".encode("latin-1") * 100
    (folder / "a.txt").write_bytes(raw)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_bytes(raw)
    assert bytes(tokens(tmp_path, "latin.bin/a.txt")) == raw
    assert bytes(tokens(tmp_path, "latin.bin")) == raw + b"\n" + raw + b"\n"
    byte_tokenizer().save(str(tmp_path / "t.json"))
    message = told(tmp_path, "latin.bin", tokenizer="t.json")
    assert message == "`train.data`: a.txt line 1 is not UTF-8: invalid continuation byte"


def test_the_line_that_is_not_utf_8_is_told_wherever_it_is(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_bytes("\u00e9\n".encode() * 70_000 + b"\xff\n")
    assert "x.txt line 70001 is not UTF-8" in told(tmp_path, "x.txt", tokenizer="t.json")
    (tmp_path / "y.txt").write_bytes(b"a\n" + "\u00e9".encode()[:1])
    assert "y.txt line 2 is not UTF-8: unexpected end of data" in told(tmp_path, "y.txt", tokenizer="t.json")


def test_a_suffix_in_upper_case_means_the_same(tmp_path: Path) -> None:
    (tmp_path / "X.JSONL").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    pyarrow.parquet.write_table(pyarrow.table({"text": LINES}), tmp_path / "X.Parquet")
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "X.BIN")
    text = "".join(f"{line}\n" for line in LINES)
    assert bytes(tokens(tmp_path, "X.JSONL")).decode() == bytes(tokens(tmp_path, "X.Parquet")).decode() == text
    assert tokens(tmp_path, "X.BIN") == list(range(300))


@pytest.mark.parametrize("tokenizer", [None, "t.json"])
def test_tokens_among_text_are_a_mistake(tmp_path: Path, tokenizer: str | None) -> None:
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "x.bin").write_bytes(b"ab" * 100)
    message = told(tmp_path, "texts", tokenizer=tokenizer)
    assert "`train.data` has a folder with x.bin, which has tokens instead of text" in message


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pyarrow.array(["a"] * 50 + [None]), "`train.column` is 'text', which is null in x.parquet row 51."),
        (pyarrow.array([b"a"] * 50), "`train.column` is 'text', which is binary instead of text in x.parquet."),
        (pyarrow.array([["a"]] * 50), "`train.column` is 'text', which is list<"),
        (pyarrow.array([{"a": 1}] * 50), "`train.column` is 'text', which is struct<"),
        (pyarrow.array([b"a"] * 40 + [b"\xff"]).view(pyarrow.string()), "x.parquet row 41 is not UTF-8 in 'text'"),
        (pyarrow.array([None] * 50), "`train.column` is 'text', which is null instead of text"),
    ],
)
def test_a_column_of_something_else_is_told_by_its_row_or_type(tmp_path: Path, column: Any, words: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    assert words in told(tmp_path, "x.parquet")


def test_a_damaged_file_is_told_in_one_line(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": LINES}), tmp_path / "x.parquet")
    raw = bytearray((tmp_path / "x.parquet").read_bytes())
    raw[5:13] = b"\xff" * 8
    (tmp_path / "x.parquet").write_bytes(raw)
    assert "`train.data`: x.parquet cannot be read as parquet: " in told(tmp_path, "x.parquet")


def test_columns_of_categories_and_with_dots_are_text_too(tmp_path: Path) -> None:
    table = pyarrow.table({"a.b": pyarrow.array(LINES).dictionary_encode(), "text": pyarrow.array(["z"] * len(LINES))})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    text = "".join(f"{line}\n" for line in LINES)
    assert bytes(tokens(tmp_path, "x.parquet", column="a.b")).decode() == text


def test_a_draft_is_removed_on_any_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    told(tmp_path, "x.jsonl")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workers.trainer.dataset.write_tokens", stopped)
    with pytest.raises(KeyboardInterrupt):
        tokens(tmp_path, "x.jsonl")
    assert [path.suffix for path in (tmp_path / ".cache").rglob("*.*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_a_file_that_cannot_be_read_is_named_and_not_the_cache(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / f"secret.{suffix}").write_text('{"text": "a"}')
    opened = Path.open

    def refused(path: Path, *arguments: Any, **more: Any) -> Any:  # root can read everything
        if path.stem == "secret":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refused)
    assert told(tmp_path, "texts") == f"`train.data`: cannot read secret.{suffix}: Permission denied"


def test_much_text_is_encoded_in_little_memory(tmp_path: Path) -> None:
    """A tokenizer holds more than 100 bytes for each character while it works."""
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "one more line of text\n" * 95_000}) + "\n")
    program = (
        "import resource, sys; from pathlib import Path; from workers.trainer.dataset import load_corpus\n"
        "load_corpus('d.txt', Path(sys.argv[1]), 300, 4, tokenizer='t.json')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "corpus = load_corpus('x.jsonl', Path(sys.argv[1]), 300, 4, tokenizer='t.json')\n"
        "print(len(corpus.train), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    (tmp_path / "d.txt").write_text("".join(LINES))
    environment = {**os.environ, "RAYON_NUM_THREADS": "2"}
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count > 1_900_000
    assert grown_kib < 200 * 1024
