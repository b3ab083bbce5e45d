"""Public training scripts, and the smallest command lines that run on two CPU cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SHAKESPEARE = "examples/distributed/minGPT-ddp/mingpt/data/input.txt"
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
FOUR_RANKS = ("torchrun", "--nproc-per-node", "4", *TORCHRUN[3:])
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)
PREPARED = ".prepared"  # file in the working folder of a script with data
PICOTRON_TOKENS_PER_STEP = 2 * 64
# Picotron imports these functions for GPUs, and does not call them on CPUs.
FLASH_ATTENTION = tuple(
    (f"flash_attn/{module}.py", f"{function} = None\n" if function else "")
    for module, function in (
        ("__init__", ""),
        ("flash_attn_interface", "flash_attn_func"),
        ("layers/rotary", "apply_rotary_emb"),
        ("ops/triton/layer_norm", "layer_norm_fn"),
    )
)


class Case(NamedTuple):
    """A script, how it prints its losses, and how it prints the times of its steps.

    `{folder}` in a command stands for the folder of all checkouts. A script runs in its checkout, or in an own folder
    if it reads files that `prepare` writes.
    """

    name: str
    repository: str
    commit: str
    checkout: str
    command: tuple[str, ...]
    axes: tuple[str, ...] = ()
    cwd: str | None = None  # below the folder, None for an own folder
    loss: str = ""  # pattern of a printed loss
    has_logged_loss: bool = False  # the script reports its loss through a library
    step_time: str = ""  # pattern of a printed step time
    to_ms: Callable[[str], float] = float
    printed_every: int = 1
    second_printed: int = 0  # index of the second printed time among the times on the page
    prepare: str = ""  # command of stand_ins.py
    files: tuple[tuple[str, str], ...] = ()  # names and contents in the working folder
    python_path: str = ""  # folder below the folder of all checkouts
    variables: tuple[tuple[str, str], ...] = ()
    fakes_accelerator: bool = False


def get_python() -> str:
    return os.environ.get("SCRIPTS_PYTHON") or sys.executable


def prepare(case: Case, folder: Path) -> Path:
    """Write the data and models of a script, and return its working folder."""
    cwd = folder / (case.cwd or f"work/{''.join(char if char.isalnum() else '-' for char in case.name)}")
    cwd.mkdir(parents=True, exist_ok=True)
    for name, content in case.files:
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(content)
    if case.prepare and not (cwd / PREPARED).exists():
        stand_ins = Path(__file__).with_name("stand_ins.py")
        text = folder / SHAKESPEARE
        subprocess.run([get_python(), stand_ins, case.prepare, text], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
        (cwd / PREPARED).touch()
    return cwd


def build_picotron_config(**degrees: int) -> str:
    """Return a configuration of picotron for two CPUs."""
    sizes = {f"{axis}_size": degrees.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")}
    training = {"seed": 42, "learning_rate": 3e-4, "total_train_steps": 40, "seq_length": 64, "num_samples": 2000}
    batch = {"micro_batch_size": 2 // degrees.get("dp", 1), "gradient_accumulation_steps": 1, "max_tokens": None}
    other = {"FLASH_ATTEN": "0", "HF_TOKEN": "none"}
    return json.dumps(
        {
            "distributed": sizes | {"pp_engine": "1f1b", "backend": "gloo", "use_cpu": True},
            "model": {"name": "tiny-llama", "dtype": "float32", "use_flash_attention": False, "use_fused_adam": False},
            "training": training | batch,
            "dataset": {"name": "tiny-text", "subset_name": None, "num_workers": 0, "num_proc": 1},
            "checkpoint": {"save_dir": "ckpt", "save_frequency": 1000, "load_path": ""},
            "logging": {"use_wandb": False, "project_name": "picotron", "run_name": None},
            "environment": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **other},
        }
    )


def get_picotron_step_ms(tokens_per_s: str) -> float:
    """Convert a rate such as `950.2` or `2.3K`."""
    rate = float(tokens_per_s.removesuffix("K")) * (1000 if tokens_per_s.endswith("K") else 1)
    return 1000 * PICOTRON_TOKENS_PER_STEP / rate


def build_picotron_case(**degrees: int) -> Case:
    """Return picotron with these degrees of parallelism on two or four ranks."""
    names = "-".join(f"{axis}{degree}" for axis, degree in degrees.items())
    return Case(
        f"picotron {names}",
        "huggingface/picotron",
        "59714b1b",
        "picotron",
        (*(TORCHRUN if len(degrees) == 1 else FOUR_RANKS), "{folder}/picotron/train.py", "--config", "config.json"),
        # gradients are summed and the loss is averaged over cp_dp, also on one rank
        axes=(*(axis for axis in degrees if axis != "dp"), "cp_dp"),
        loss=r"Loss: +([\d.]+)",
        step_time=r"Tokens/s: +([\d.]+K?)",
        to_ms=get_picotron_step_ms,
        prepare="llama",
        files=(("config.json", build_picotron_config(**degrees)), *FLASH_ATTENTION),
        fakes_accelerator=True,
    )


EXAMPLES, EXAMPLES_COMMIT = "pytorch/examples", "77f55b91"
TENSOR_PARALLELISM = "examples/distributed/tensor_parallelism"
CASES = (
    Case(
        "nanoGPT",
        "karpathy/nanoGPT",
        "3adf61e1",
        "nanoGPT",
        (
            *("python", "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False"),
            *("--eval_iters=1", "--eval_interval=1000", "--log_interval=1", "--block_size=64", "--batch_size=8"),
            *("--n_layer=2", "--n_head=2", "--n_embd=64", "--max_iters=60", "--dropout=0.0"),
        ),
        cwd="nanoGPT",
        loss=r"iter \d+: loss ([\d.]+)",
        step_time=r"iter \d+: loss [\d.]+, time ([\d.]+)ms",
        prepare="characters",
    ),
    Case(
        "minGPT adder",
        "karpathy/minGPT",
        "37baab71",
        "minGPT",
        (
            *("python", "projects/adder/adder.py", "--trainer.max_iters=51", "--model.model_type=gpt-nano"),
            "--trainer.num_workers=0",
        ),
        cwd="minGPT",
        loss=r"train loss ([\d.]+)",
        step_time=r"iter_dt ([\d.]+)ms",
        printed_every=10,
        second_printed=8,  # the script prints the time of the iteration before
        python_path="minGPT",
    ),
    Case(
        "nanochat base_train",
        "karpathy/nanochat",
        "92d63d4e",
        "nanochat",
        (
            *("python", "-m", "scripts.base_train", "--depth=2", "--head-dim=64", "--max-seq-len=128"),
            *("--device-batch-size=2", "--eval-tokens=256", "--core-metric-every=-1", "--total-batch-size=512"),
            *("--num-iterations=40", "--sample-every=-1", "--eval-every=-1", "--window-pattern=L"),
        ),
        loss=r"\| loss: ([\d.]+)",
        step_time=r"\| dt: ([\d.]+)ms",
        prepare="nanochat",
        python_path="nanochat",
        variables=(("NANOCHAT_BASE_DIR", "base"),),
    ),
    build_picotron_case(tp=2),
    build_picotron_case(pp=2),
    build_picotron_case(dp=2),
    build_picotron_case(dp=2, tp=2),
    Case(
        "examples TP",
        EXAMPLES,
        EXAMPLES_COMMIT,
        "examples",
        (*TORCHRUN, "tensor_parallel_example.py"),
        axes=("world",),
        cwd=TENSOR_PARALLELISM,
        fakes_accelerator=True,
    ),
    Case(
        "examples SP",
        EXAMPLES,
        EXAMPLES_COMMIT,
        "examples",
        (*TORCHRUN, "sequence_parallel_example.py"),
        axes=("world",),
        cwd=TENSOR_PARALLELISM,
        fakes_accelerator=True,
    ),
    Case(
        "accelerate complete_nlp_example",
        "huggingface/accelerate",
        "16cb6eb8",
        "accelerate",
        (*ACCELERATE, "{folder}/accelerate/examples/complete_nlp_example.py", "--cpu", "--with_tracking"),
        axes=("world",),
        loss=r"epoch (\d+: .*)",
        has_logged_loss=True,
        prepare="glue",
    ),
    Case(
        "Alpaca (transformers Trainer)",
        "tatsu-lab/stanford_alpaca",
        "761dc5bf",
        "stanford_alpaca",
        (
            *(*TORCHRUN, "{folder}/stanford_alpaca/train.py", "--model_name_or_path", "tiny-gpt2"),
            *("--data_path", "instructions.json", "--output_dir", "out", "--num_train_epochs", "1", "--use_cpu"),
            *("--per_device_train_batch_size", "4", "--logging_steps", "1", "--report_to", "none"),
            *("--save_strategy", "no", "--ddp_backend", "gloo", "--disable_tqdm", "True"),
        ),
        axes=("world",),
        loss=r"'loss': '?([\d.]+)",
        has_logged_loss=True,
        prepare="instructions",
        files=(("openai/__init__.py", "class openai_object:\n    OpenAIObject = None\n"),),  # only for its data
    ),
    Case(
        "Fabric language_model",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436",
        "pytorch-lightning",
        (
            *("fabric", "run", "--accelerator=cpu", "--devices=2", "--strategy=ddp"),
            "{folder}/pytorch-lightning/examples/fabric/language_model/train.py",
        ),
        axes=("world",),
        loss=r"- loss ([\d.]+)",
        prepare="words",
    ),
    Case(
        "HelloDeepSpeed",
        "deepspeedai/DeepSpeedExamples",
        "45b4b715",
        "DeepSpeedExamples",
        (
            *("deepspeed", "--num_accelerators", "2"),
            "{folder}/DeepSpeedExamples/training/HelloDeepSpeed/train_bert_ds.py",
            *("--checkpoint_dir", "checkpoints", "--num_layers", "2", "--ff_dim", "128", "--h_dim", "64"),
            *("--num_heads", "2", "--max_seq_length", "64", "--num_iterations", "41", "--log_every", "2"),
        ),
        axes=("world",),
        loss=r"Loss: ([\d.]+)",
        prepare="wikitext",
    ),
)
