"""Train a tokenizer and a model, sample text, and export both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.processes import ROOT
from tests.workers.checkpoint.runs import make_spec
from webapp.runner import find_free_port
from workers.checkpoint.__main__ import main
from workers.checkpoint.inference import evaluate, find_tokenizer, get_text_encoder, load_model, sample
from workers.trainer.errors import UserError

VOCAB = 300
MODEL = {"vocab_size": VOCAB, "num_layers": 2}
LINE = "the model goes on: caf\u00e9 {i}, and on"


def command(module: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", module, *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data root with checkpoints of a trained model."""
    root = tmp_path_factory.mktemp("root")
    rows = ({"body": LINE.format(i=i)} for i in range(300))
    (root / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = root / "bpe.json"
    made = command(
        "workers.tokenizer", "train", root / "d.jsonl", "--column", "body", "--vocab-size", VOCAB, "--out", out
    )
    assert made.returncode == 0, made.stderr
    train = {"data": "d.jsonl", "column": "body", "tokenizer": "bpe.json", "checkpoint_every": 20, "eval_every": 20}
    spec = make_spec({}, steps=20, learning_rate=0.01, **train).model_dump(mode="json")
    spec["model"] |= MODEL
    (root / "spec.json").write_text(json.dumps(spec))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    places = ("--spec", root / "spec.json", "--data-root", root, "--checkpoint-root", root / "saved")
    trained = command("workers.trainer", *places, **alone)
    assert trained.returncode == 0, trained.stderr
    (root / "said.txt").write_text(trained.stdout)
    return root


@pytest.mark.slow
def test_samples_text_with_the_tokenizer_of_the_job(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = root / "saved" / "local"
    greedy = ("--prompt", "the model", "--tokens", "8", "--temperature", "0")
    by_root = command("workers.checkpoint", "sample", saved, "--data-root", root, *greedy)
    argv = ["checkpoint", "sample", str(saved), "--tokenizer", str(root / "bpe.json"), *greedy]
    monkeypatch.setattr(sys, "argv", argv)
    assert main() == 0
    assert by_root.returncode == 0, by_root.stderr
    tokenizer = Tokenizer.from_file(str(root / "bpe.json"))
    prompt = tokenizer.encode("the model").ids
    made = sample(load_model(saved, print), prompt, 8, 0.0, 0)
    assert (
        by_root.stdout == capsys.readouterr().out == tokenizer.decode(prompt + made, skip_special_tokens=False) + "\n"
    )
    assert len(prompt) < len("the model") / 2


def test_evaluates_with_the_tokenizer_and_column_of_the_job(root: Path) -> None:
    (said,) = [line for line in (root / "said.txt").read_text().splitlines() if "validation loss" in line]
    found = evaluate(load_model(root / "saved" / "local", print), "d.jsonl", root, 8)
    assert float(said.split()[-1]) == pytest.approx(found, abs=1e-4)


def test_transformers_loads_the_exported_tokenizer(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = root / "saved" / "local", tmp_path / "out"
    argv = ["checkpoint", "export", str(saved), "--out", str(out), "--data-root", str(root)]
    monkeypatch.setattr(sys, "argv", argv)
    assert main() == 0
    assert "tokenizer.json" in capsys.readouterr().out
    ours = Tokenizer.from_file(str(root / "bpe.json"))
    text = LINE.format(i=7) + "<|endoftext|>"
    # seconds, which all that collect would take
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    for theirs in (PreTrainedTokenizerFast.from_pretrained(out), AutoTokenizer.from_pretrained(out)):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
        assert theirs.eos_token_id == ours.token_to_id("<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.eos_token_id == ours.token_to_id("<|endoftext|>")
    prompt = ours.encode("the model").ids
    made = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert made == prompt + sample(load_model(saved, print), prompt, len(made) - len(prompt), 0.0, 0)

    monkeypatch.setattr(sys, "argv", ["checkpoint", "export", str(saved), "--out", str(tmp_path / "without")])
    assert main() == 0
    assert "tokenizer.json is missing. To add the tokenizer 'bpe.json' of the job" in capsys.readouterr().err
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["checkpoint", "export", str(saved), "--out", str(tmp_path / "file" / "out")])
    assert main() == 2
    assert "error: `--out` is " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "without"]


def test_rejects_a_missing_or_larger_tokenizer(root: Path, tmp_path: Path) -> None:
    spec = make_spec({}, data="d.jsonl", tokenizer="bpe.json")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update=MODEL)})
    grown = Tokenizer.from_file(str(root / "bpe.json"))
    grown.add_tokens(["one more"])
    grown.save(str(tmp_path / "bpe.json"))
    (tmp_path / "empty").mkdir()
    wrong: list[tuple[Path | None, Path | None, str]] = [
        (None, None, r"the job uses the tokenizer 'bpe.json' \(`train.tokenizer`\). Use"),
        (None, tmp_path / "empty", "`train.tokenizer` is 'bpe.json', which does not exist below the data root"),
        (None, tmp_path, "`train.tokenizer` 'bpe.json' has 301 tokens, more than the vocab_size 300"),
        (tmp_path / "bpe.json", None, "`--tokenizer` '.*bpe.json' has 301 tokens"),
        (tmp_path / "none.json", None, "`--tokenizer` '.*none.json' cannot be read: No such file or directory"),
    ]
    for given, data_root, words in wrong:
        with pytest.raises(UserError, match=words):
            get_text_encoder(spec, given, data_root)


def test_uses_bytes_without_a_tokenizer() -> None:
    wide = make_spec({})
    wide = wide.model_copy(update={"model": wide.model.model_copy(update=MODEL)})
    assert get_text_encoder(wide, None, None).encode(["\u00e9"]) == [[0xC3, 0xA9]]
    tokens = wide.model_copy(update={"train": wide.train.model_copy(update={"data": "x.BIN"})})
    assert find_tokenizer(tokens, None, None) is None
    with pytest.raises(UserError, match=r"the job reads tokens from 'x\.BIN'"):
        get_text_encoder(tokens, None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "nan"), "`--temperature` is nan. Use at least 0."),
        (("--tokens", "-1"), "`--tokens` is -1. Use at least 0."),
        (("--seed", "99999999999999999999"), "`--seed` is 99999999999999999999. Use at least 0"),
        (("--prompt", ""), "`--prompt` has no tokens"),
        (("--prompt", os.fsdecode(b"\xff")), "`--prompt` is not UTF-8"),
    ],
)
def test_rejects_invalid_arguments(
    root: Path,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = ("--tokenizer", str(root / "bpe.json"))
    monkeypatch.setattr(sys, "argv", ["checkpoint", "sample", str(root / "saved" / "local"), *tokenizer, *arguments])
    assert main() == 2
    assert f"error: {words}" in capsys.readouterr().err
