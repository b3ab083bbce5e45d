"""Batches depend only on seed and step, and files outside the data root are never read."""

from __future__ import annotations

import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from workers.trainer.dataset import HELD_OUT_SHARE, TokenDataset, load_dataset
from workers.trainer.errors import UserError

SEQ_LEN = 16
BATCH = 12
TOKENS = 40_000


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
    parts = (1900 - 1) // SEQ_LEN  # 118: no multiple of the batch, so batches lie across epochs
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
