"""Export, evaluate, and sample from the model of a checkpoint."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.processes import ROOT
from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.checkpoint.__main__ import main
from workers.checkpoint.inference import evaluate, export, load_model, sample

LAYOUTS: dict[str, dict[str, Any]] = {"gpt": {"pp": 2}, "llama": {"tp": 2}, "moe": {"dp": 2, "ep": 2, "zero": 3}}
VARIANTS = {"llama": "vocabulary of 257", "moe": "stretched"}  # tp pads while it trains; RoPE as Llama 3.1's


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ran]]:
    root = tmp_path_factory.mktemp("checkpoints") / "root"
    train = {"checkpoint_every": 6, "eval_every": 6}
    specs = {arch: make_spec(layout, arch, VARIANTS.get(arch, ""), **train) for arch, layout in LAYOUTS.items()}
    return root, {arch: run(spec, root, job=arch) for arch, spec in specs.items()}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
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

    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.config.vocab_size == whole.spec.model.vocab_size
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(whole.decoder(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    refused = command("export", str(root / arch), "--out", str(folder))
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
    listed = command("list", str(root)).stdout
    assert "moe/1/step-00000006" in listed
    assert "dp2 pp1 tp1 cp1 ep2 zero3" in listed
    told = command("evaluate", str(root / "gpt"), "--data-root", str(root.parent / "data"), "--sequences", "2")
    assert "nats per token on 2 held-out sequences of stdlib" in told.stdout, told.stderr
    asked = ["sample", str(root / "gpt/1/step-00000006"), "--prompt", "import ", "--tokens", "5"]
    argv = [sys.executable, "-m", "workers.checkpoint", *asked]
    text = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert text.stdout.startswith("import ")
    none = command("sample", str(tmp_path))
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)
    assert "no complete checkpoint" in none.stderr
