"""Batches depend only on seed and step, and invalid or malicious data causes one clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.trainer.dataset import HELD_OUT_SHARE, TokenDataset, load_dataset
from workers.trainer.errors import UserError

SEQ_LEN = 16
BATCH = 12
TOKENS = 40_000
ROOT = Path(__file__).resolve().parents[3]
SHORT_SEQ_LEN = 4
LINES = [f"line {i} of \u00e9\n" for i in range(200)]
TOO_LONG = "x" * 300


@pytest.fixture
def counting(tmp_path: Path) -> TokenDataset:
    """Create tokens that equal their positions."""
    np.arange(TOKENS, dtype=np.uint16).tofile(tmp_path / "counting.bin")
    return load_dataset("counting.bin", tmp_path, TOKENS, SEQ_LEN)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_replicas(counting: TokenDataset, dp: int) -> None:
    whole = counting.train_batch(7, 3, BATCH, slice(0, BATCH), SEQ_LEN)
    share = BATCH // dp
    parts = [counting.train_batch(7, 3, BATCH, slice(i * share, (i + 1) * share), SEQ_LEN) for i in range(dp)]
    assert whole.shape == (BATCH, SEQ_LEN + 1)
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_batch_depends_only_on_seed_and_step(counting: TokenDataset) -> None:
    def batch(seed: int, step: int) -> np.ndarray:
        return counting.train_batch(seed, step, BATCH, slice(0, BATCH), SEQ_LEN)

    assert np.array_equal(batch(7, 3), batch(7, 3))
    assert not np.array_equal(batch(7, 3), batch(7, 4))
    assert not np.array_equal(batch(7, 3), batch(8, 3))


def test_sequences_are_consecutive_tokens(counting: TokenDataset) -> None:
    batch = counting.train_batch(7, 0, BATCH, slice(0, BATCH), SEQ_LEN)
    assert np.array_equal(np.diff(batch, axis=1), np.ones((BATCH, SEQ_LEN)))


@pytest.fixture
def in_epochs(tmp_path: Path) -> TokenDataset:
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "short.bin")
    return load_dataset("short.bin", tmp_path, 2000, SEQ_LEN, sampling="epochs")


def test_an_epoch_has_each_sequence_once_in_a_new_order(in_epochs: TokenDataset) -> None:
    parts = (1900 - 1) // SEQ_LEN  # 118 is no multiple of the batch, so some batches span two epochs
    drawn = [in_epochs.train_batch(7, step, BATCH, slice(0, BATCH), SEQ_LEN)[:, 0] for step in range(20)]
    first, second = np.concatenate(drawn)[:parts], np.concatenate(drawn)[parts : 2 * parts]
    every = np.arange(parts) * SEQ_LEN
    assert np.array_equal(np.sort(first), every)
    assert np.array_equal(np.sort(second), every)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, every), "shuffled"


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_an_epoch_batch_depends_only_on_its_step(in_epochs: TokenDataset, dp: int) -> None:
    share = BATCH // dp
    parts = [in_epochs.train_batch(7, 9, BATCH, slice(i * share, (i + 1) * share), SEQ_LEN) for i in range(dp)]
    again = in_epochs.train_batch(7, 9, BATCH, slice(0, BATCH), SEQ_LEN)
    assert np.array_equal(np.concatenate(parts), again)
    assert np.array_equal(np.diff(again, axis=1), np.ones((BATCH, SEQ_LEN)))
    assert not np.array_equal(in_epochs.train_batch(8, 9, BATCH, slice(0, BATCH), SEQ_LEN), again)


def test_only_validation_reads_the_held_out_end(counting: TokenDataset) -> None:
    first_held_out = TOKENS - int(TOKENS * HELD_OUT_SHARE)
    trained = [counting.train_batch(7, step, BATCH, slice(0, BATCH), SEQ_LEN) for step in range(400)]
    validated = counting.eval_batch(7, BATCH, slice(0, BATCH), SEQ_LEN)
    assert np.max(trained) < first_held_out <= validated.min()
    assert np.array_equal(validated, counting.eval_batch(7, BATCH, slice(0, BATCH), SEQ_LEN))


def test_the_default_data_is_the_standard_library(tmp_path: Path) -> None:
    corpus = load_dataset("stdlib", tmp_path, 256, SEQ_LEN)
    text = bytes(corpus.train) + bytes(corpus.held_out)
    assert len(text) > 5 * 2**20
    assert (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes() in text


def test_concurrent_ranks_share_one_cached_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        corpora = list(pool.map(lambda _: load_dataset("stdlib", tmp_path, 256, SEQ_LEN), range(8)))
    assert len({bytes(c.held_out) for c in corpora}) == 1
    names = sorted(p.name for p in (tmp_path / ".cache" / str(os.geteuid())).iterdir())
    assert names == [names[0], f"{names[0]}.lock"]


def test_reads_a_folder_in_a_fixed_order_without_hidden_files_and_symlinks(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"S" * 5000)
    folder = tmp_path / "root" / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"b" * 1000)
    (folder / "a.txt").write_bytes(b"a" * 1000)
    (folder / "deeper" / "c.txt").write_bytes(b"c" * 1000)
    (folder / ".hidden").write_bytes(b"H" * 1000)
    (folder / "link.txt").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(folder / "pipe.txt")
    corpus = load_dataset("texts", tmp_path / "root", 256, SEQ_LEN)
    assert bytes(corpus.train) + bytes(corpus.held_out) == b"%s\n%s\n%s\n" % (b"a" * 1000, b"b" * 1000, b"c" * 1000)


@pytest.mark.parametrize("data", ["../outside.txt", "inner/../../outside.txt", "link.txt", "linked/outside.txt"])
def test_rejects_a_path_outside_the_data_root(tmp_path: Path, data: str) -> None:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "outside.txt").write_bytes(b"x" * 5000)
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "linked").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(UserError, match=r"`train\.data` is .*, which is outside the data root"):
        load_dataset(data, root, 256, SEQ_LEN)


def test_rejects_an_absolute_path(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.txt").write_bytes(b"x" * 5000)
    with pytest.raises(UserError, match="outside the data root"):
        load_dataset(str(tmp_path / "outside.txt"), root, 256, SEQ_LEN)


def test_explains_invalid_data(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 339)  # 5% of 339 is 16, a sequence needs 17
    (tmp_path / "enough.txt").write_bytes(b"x" * 340)
    (tmp_path / "odd.bin").write_bytes(b"x" * 4001)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        "missing.txt": "`train.data` is 'missing.txt', which does not exist below the data root",
        "empty.txt": "'empty.txt' with 0 tokens",
        "empty.bin": "'empty.bin' with 0 tokens",
        "short.txt": r"with 339 tokens, but about 34. are needed. The held-out 5% needs one sequence of 16 \+ 1 tokens",
        "odd.bin": "with 4001 bytes, which is not a multiple of 2",
        "folder": "'folder' with 0 tokens",
        "pipe": "Use a regular file or a folder",
    }
    for data, message in wrong.items():
        with pytest.raises(UserError, match=message):
            load_dataset(data, tmp_path, 256, SEQ_LEN)
    assert len(load_dataset("enough.txt", tmp_path, 256, SEQ_LEN).held_out) == SEQ_LEN + 1


def test_names_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    tokens = np.zeros(5000, dtype=np.uint16)
    tokens[[70, 4999]] = 300, 301
    tokens.tofile(tmp_path / "large.bin")
    corpus = load_dataset("large.bin", tmp_path, 256, SEQ_LEN)
    where = r"'large.bin', which has token {} at position {}. Use tokens below the vocab_size 256"
    with pytest.raises(UserError, match=where.format(300, "70")):
        corpus.train_batch(1, 0, 5000, slice(0, 5000), SEQ_LEN)
    with pytest.raises(UserError, match=where.format(301, "4,999")):
        corpus.eval_batch(1, 5000, slice(0, 5000), SEQ_LEN)


def test_explains_a_data_root_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    with pytest.raises(UserError, match=r"Cannot write stdlib-.* for `train.data` to \.cache"):
        load_dataset("stdlib", tmp_path, 256, SEQ_LEN)


def tokens(root: Path, data: str, vocab: int = 300, **more: Any) -> list[int]:
    corpus = load_dataset(data, root, vocab, SHORT_SEQ_LEN, **more)
    return [*corpus.train.tolist(), *corpus.held_out.tolist()]


def byte_tokenizer(**bpe: Any) -> Tokenizer:
    """Create a tokenizer with one token per byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, [], **bpe))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return made


def read_result(root: Path, data: str, **more: Any) -> str:
    """Return the error of a load, and check that no draft is left."""
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
def test_names_the_number_of_an_invalid_line(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    message = read_result(tmp_path, "x.jsonl")
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
def test_names_the_field_of_an_invalid_file_name(tmp_path: Path, field: str, name: str, words: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "x.txt").write_text("".join(LINES))
    message = read_result(tmp_path, **{"data": "x.txt", field: name})
    assert message.startswith(f"`train.{field}` is ")
    assert words in message
    assert len(message) < 300


@pytest.mark.parametrize("name", ["pipe", "folder"])
def test_rejects_a_tokenizer_that_is_not_a_regular_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert read_result(tmp_path, "x.txt", tokenizer=name) == f"`train.tokenizer` '{name}' is not a regular file"


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
def test_the_command_reports_the_same_error_and_leaves_no_file(
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
def test_rejects_an_invalid_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    (tmp_path / "t.json").write_bytes(content)
    assert "`train.tokenizer` 't.json' is not tokenizers JSON: " in read_result(tmp_path, "x.txt", tokenizer="t.json")


def test_rejects_text_that_the_tokenizer_cannot_encode(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    made = Tokenizer(models.WordLevel({"line": 0}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    assert "`train.tokenizer` 't.json' cannot encode a text: WordLevel" in read_result(
        tmp_path, "x.txt", tokenizer="t.json"
    )


def test_the_largest_token_determines_the_vocabulary_size(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(LINES))
    made = Tokenizer(models.WordLevel({"line": 0, "[UNK]": 5000}, unk_token="[UNK]"))
    made.save(str(tmp_path / "t.json"))
    assert "'t.json' has 5001 tokens, more than the vocab_size 300" in read_result(
        tmp_path, "x.txt", tokenizer="t.json"
    )


def test_disables_truncation_padding_and_dropout(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    plain, odd = byte_tokenizer(), byte_tokenizer(dropout=0.9)
    odd.enable_truncation(3)
    odd.enable_padding(length=100)
    plain.save(str(tmp_path / "plain.json"))
    odd.save(str(tmp_path / "odd.json"))
    found = tokens(tmp_path, "x.jsonl", tokenizer="odd.json")
    assert found == tokens(tmp_path, "x.jsonl", tokenizer="plain.json")
    assert plain.decode(found, skip_special_tokens=False) == "".join(f"{line}<|endoftext|>" for line in LINES)


def test_each_file_of_a_folder_is_a_document(tmp_path: Path) -> None:
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


def test_copies_bytes_of_folders_and_files_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "latin.bin"
    folder.mkdir()
    raw = "caf\u00e9 cr\u00e8me\r\n".encode("latin-1") * 100
    (folder / "a.txt").write_bytes(raw)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_bytes(raw)
    assert bytes(tokens(tmp_path, "latin.bin/a.txt")) == raw
    assert bytes(tokens(tmp_path, "latin.bin")) == raw + b"\n" + raw + b"\n"
    byte_tokenizer().save(str(tmp_path / "t.json"))
    message = read_result(tmp_path, "latin.bin", tokenizer="t.json")
    assert message == "`train.data`: a.txt line 1 is not UTF-8: invalid continuation byte"


def test_names_the_line_that_is_not_utf_8(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_bytes("\u00e9\n".encode() * 70_000 + b"\xff\n")
    assert "x.txt line 70001 is not UTF-8" in read_result(tmp_path, "x.txt", tokenizer="t.json")
    (tmp_path / "y.txt").write_bytes(b"a\n" + "\u00e9".encode()[:1])
    assert "y.txt line 2 is not UTF-8: unexpected end of data" in read_result(tmp_path, "y.txt", tokenizer="t.json")


def test_suffixes_are_case_insensitive(tmp_path: Path) -> None:
    (tmp_path / "X.JSONL").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    pyarrow.parquet.write_table(pyarrow.table({"text": LINES}), tmp_path / "X.Parquet")
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "X.BIN")
    text = "".join(f"{line}\n" for line in LINES)
    assert bytes(tokens(tmp_path, "X.JSONL")).decode() == bytes(tokens(tmp_path, "X.Parquet")).decode() == text
    assert tokens(tmp_path, "X.BIN") == list(range(300))


@pytest.mark.parametrize("tokenizer", [None, "t.json"])
def test_rejects_token_files_among_text_files(tmp_path: Path, tokenizer: str | None) -> None:
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "x.bin").write_bytes(b"ab" * 100)
    message = read_result(tmp_path, "texts", tokenizer=tokenizer)
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
def test_names_the_row_or_type_of_an_invalid_column(tmp_path: Path, column: Any, words: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    assert words in read_result(tmp_path, "x.parquet")


def test_reports_a_damaged_file_in_one_line(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": LINES}), tmp_path / "x.parquet")
    raw = bytearray((tmp_path / "x.parquet").read_bytes())
    raw[5:13] = b"\xff" * 8
    (tmp_path / "x.parquet").write_bytes(raw)
    assert "`train.data`: x.parquet cannot be read as parquet: " in read_result(tmp_path, "x.parquet")


def test_accepts_dictionary_columns_and_names_with_dots(tmp_path: Path) -> None:
    table = pyarrow.table({"a.b": pyarrow.array(LINES).dictionary_encode(), "text": pyarrow.array(["z"] * len(LINES))})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    text = "".join(f"{line}\n" for line in LINES)
    assert bytes(tokens(tmp_path, "x.parquet", column="a.b")).decode() == text


def test_removes_the_draft_after_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    read_result(tmp_path, "x.jsonl")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workers.trainer.dataset.write_tokens", stopped)
    with pytest.raises(KeyboardInterrupt):
        tokens(tmp_path, "x.jsonl")
    assert [path.suffix for path in (tmp_path / ".cache").rglob("*.*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_names_an_unreadable_file(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / f"secret.{suffix}").write_text('{"text": "a"}')
    opened = Path.open

    def refused(path: Path, *arguments: Any, **more: Any) -> Any:  # root can read everything
        if path.stem == "secret":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refused)
    assert read_result(tmp_path, "texts") == f"`train.data`: cannot read secret.{suffix}: Permission denied"


def test_encodes_large_files_with_bounded_memory(tmp_path: Path) -> None:
    """A tokenizer needs more than 100 bytes per character."""
    byte_tokenizer().save(str(tmp_path / "t.json"))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "one more line of text\n" * 95_000}) + "\n")
    program = (
        "import resource, sys; from pathlib import Path; from workers.trainer.dataset import load_dataset\n"
        "load_dataset('d.txt', Path(sys.argv[1]), 300, 4, tokenizer='t.json')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "corpus = load_dataset('x.jsonl', Path(sys.argv[1]), 300, 4, tokenizer='t.json')\n"
        "print(len(corpus.train), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    (tmp_path / "d.txt").write_text("".join(LINES))
    environment = {**os.environ, "RAYON_NUM_THREADS": "2"}
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count > 1_900_000
    assert grown_kib < 200 * 1024
