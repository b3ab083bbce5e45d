"""Train a tokenizer and a model, then evaluate, sample from, and export its checkpoint."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.processes import ROOT
from tests.workers.checkpoint.runs import Ran, make_spec, run
from webapp.runner import find_free_port
from workers.checkpoint.__main__ import main
from workers.checkpoint.inference import evaluate, export, find_tokenizer, get_text_encoder, load_model, sample
from workers.trainer.errors import UserError

VOCAB = 300
MODEL = {"vocab_size": VOCAB, "num_layers": 2}
LINE = "the model goes on: caf\u00e9 {i}, and on"
LAYOUTS: dict[str, dict[str, Any]] = {"gpt": {"pp": 2}, "llama": {"tp": 2}, "moe": {"dp": 2, "ep": 2, "zero": 3}}
VARIANTS = {"llama": "vocabulary of 257", "moe": "stretched"}  # tp pads while it trains; RoPE as Llama 3.1's


def run_command(module: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
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
    made = run_command(
        "workers.tokenizer", "train", root / "d.jsonl", "--column", "body", "--vocab-size", VOCAB, "--out", out
    )
    assert made.returncode == 0, made.stderr
    train = {"data": "d.jsonl", "column": "body", "tokenizer": "bpe.json", "checkpoint_every": 20, "eval_every": 20}
    spec = make_spec({}, steps=20, learning_rate=0.01, **train).model_dump(mode="json")
    spec["model"] |= MODEL
    (root / "spec.json").write_text(json.dumps(spec))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    places = ("--spec", root / "spec.json", "--data-root", root, "--checkpoint-root", root / "saved")
    trained = run_command("workers.trainer", *places, **alone)
    assert trained.returncode == 0, trained.stderr
    (root / "said.txt").write_text(trained.stdout)
    return root


@pytest.mark.slow
def test_samples_text_with_the_tokenizer_of_the_job(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = root / "saved" / "local"
    greedy = ("--prompt", "the model", "--tokens", "8", "--temperature", "0")
    by_root = run_command("workers.checkpoint", "sample", saved, "--data-root", root, *greedy)
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
    (messages,) = [line for line in (root / "said.txt").read_text().splitlines() if "validation loss" in line]
    found = evaluate(load_model(root / "saved" / "local", print), "d.jsonl", root, 8)
    assert float(messages.split()[-1]) == pytest.approx(found, abs=1e-4)


def test_transformers_loads_the_exported_tokenizer(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = root / "saved" / "local", tmp_path / "out"
    argv = ["checkpoint", "export", str(saved), "--out", str(out), "--data-root", str(root)]
    monkeypatch.setattr(sys, "argv", argv)
    assert main() == 0
    assert "tokenizer.json" in capsys.readouterr().out
    actual = Tokenizer.from_file(str(root / "bpe.json"))
    text = LINE.format(i=7) + "<|endoftext|>"
    # seconds, which all that collect would take
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    for expected in (PreTrainedTokenizerFast.from_pretrained(out), AutoTokenizer.from_pretrained(out)):
        assert expected(text)["input_ids"] == actual.encode(text).ids
        assert expected.decode(expected(text)["input_ids"]) == text
        assert expected.eos_token_id == actual.token_to_id("<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.eos_token_id == actual.token_to_id("<|endoftext|>")
    prompt = actual.encode("the model").ids
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
    for options, data_root, words in wrong:
        with pytest.raises(UserError, match=words):
            get_text_encoder(spec, options, data_root)


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ran]]:
    root = tmp_path_factory.mktemp("checkpoints") / "root"
    train = {"checkpoint_every": 6, "eval_every": 6}
    specs = {arch: make_spec(layout, arch, VARIANTS.get(arch, ""), **train) for arch, layout in LAYOUTS.items()}
    return root, {arch: run(spec, root, job=arch) for arch, spec in specs.items()}


def call_main(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, where torch is already imported."""
    argv, out, err = ["workers.checkpoint", *arguments], io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        code = main()
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("arch", list(LAYOUTS))
def test_transformers_computes_the_same_logits_from_the_export(
    trained: tuple[Path, dict[str, Ran]], arch: str, tmp_path: Path
) -> None:
    root, _ = trained
    whole = load_model(root / arch, print)
    folder = export(whole, tmp_path / "exported")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    from transformers import AutoModelForCausalLM  # seconds, which all that collect would take

    expected, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert expected.config.vocab_size == whole.spec.model.vocab_size
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(whole.decoder(tokens), expected(tokens).logits, rtol=1e-4, atol=1e-5)
    refused = call_main("export", str(root / arch), "--out", str(folder))
    assert (refused.returncode, "Use a new folder" in refused.stderr) == (2, True)


def test_evaluate_returns_the_validation_loss_of_the_run(trained: tuple[Path, dict[str, Ran]]) -> None:
    root, runs = trained
    for arch, ran in runs.items():
        (validation,) = ran.of_kind("eval")
        found = evaluate(load_model(root / arch, print), "stdlib", root.parent / "data", 8)
        assert found == pytest.approx(validation["loss"], rel=1e-5)


def test_samples_depend_on_model_and_seed(trained: tuple[Path, dict[str, Ran]]) -> None:
    whole = load_model(trained[0] / "gpt", print)
    greedy = sample(whole, [100, 101], 3, 0.0, 0)
    with torch.no_grad():
        assert greedy[0] == int(whole.decoder(torch.tensor([[100, 101]]))[0, -1].argmax())
    assert sample(whole, [100], 20, 1.0, 1) == sample(whole, [100], 20, 1.0, 1) != sample(whole, [100], 20, 1.0, 2)
    assert len(sample(whole, [100] * 40, 3, 1.0, 1)) == 3, "a prompt longer than the model's context"


def test_commands_list_evaluate_sample_and_reject(trained: tuple[Path, dict[str, Ran]], tmp_path: Path) -> None:
    root, _ = trained
    listed = call_main("list", str(root)).stdout
    assert "moe/1/step-00000006" in listed
    assert "dp2 pp1 tp1 cp1 ep2 zero3" in listed
    result = call_main("evaluate", str(root / "gpt"), "--data-root", str(root.parent / "data"), "--sequences", "2")
    assert "nats per token on 2 held-out sequences of stdlib" in result.stdout, result.stderr
    request = ["sample", str(root / "gpt/1/step-00000006"), "--prompt", "import ", "--tokens", "5"]
    argv = [sys.executable, "-m", "workers.checkpoint", *request]
    text = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert text.stdout.startswith("import ")
    none = call_main("sample", str(tmp_path))
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)
    assert "no complete checkpoint" in none.stderr
