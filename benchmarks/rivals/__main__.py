"""Compare tokens/s of the trainer with the train.py of nanoGPT and of picotron.

    python -m benchmarks.rivals --nanogpt PATH --picotron PATH [--blocks N] [--only tp2]

PATH is a checkout. Both sides run at the same time on gloo ranks with one thread each. They take turns of a few steps,
so that a slow moment affects both. The ratio is of medians. Meshboard's ranks use jemalloc if it is installed, as on a
host. The other side starts as its README says. Model, batch, length, and type are equal: nanoGPT runs DDP on 2 ranks
with gpt-mini, and picotron runs each axis with llama-mini. Picotron does not clip gradients, sums no gradients with CP
alone, and neither project counts its traffic. Each match runs eager, then with Meshboard compiled. NanoGPT is then
compiled too. Picotron cannot compile. It has only the 1F1B schedule: Meshboard runs 1F1B and zbv, which has almost no
bubble.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from benchmarks.rivals.turn_taking import RankGroup, Step
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from workers.host.programs import get_heap_variables

ROOT = Path(__file__).resolve().parents[2]
DATA = "rivals.bin"
VOCAB = 256
TRAIN = {"global_batch": 8, "seq_len": 256, "steps": 10_000_000, "eval_every": 0, "data": DATA}
GPT = {"preset": "gpt-mini", "max_seq_len": TRAIN["seq_len"]}  # a table of positions as long as nanoGPT's
LLAMA = {"preset": "llama-mini"}


class Match(NamedTuple):
    """The other train.py, the layout, and the target ratio of tokens/s."""

    rival: str
    model: Mapping[str, Any]
    layout: Mapping[str, Any]
    micro_batches: int
    goal: float
    compile: bool = False

    @property
    def spec(self) -> JobSpec:
        train = {**TRAIN, "micro_batches": self.micro_batches, "compile": self.compile}
        return parse_fields({"model": self.model, "layout": self.layout, "train": train})


EAGER = {
    "nanogpt dp2": Match("nanogpt", GPT, {"dp": 2}, 1, 1.0),
    "picotron tp2": Match("picotron", LLAMA, {"tp": 2}, 4, 1.2),
    "picotron pp2": Match("picotron", LLAMA, {"pp": 2}, 4, 1.2),
    "picotron pp2, ours zbv": Match("picotron", LLAMA, {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, 4, 1.2),
    "picotron cp2": Match("picotron", LLAMA, {"cp": 2}, 4, 1.2),
    "picotron dp2 x tp2": Match("picotron", LLAMA, {"dp": 2, "tp": 2}, 4, 1.2),
}
MATCHES = {**EAGER, **{f"{name} compiled": match._replace(compile=True) for name, match in EAGER.items()}}


def write_tokens(folder: Path) -> None:
    """Write tokens with different frequencies where each side reads them."""
    weights = 1 / np.arange(1, VOCAB + 1)
    tokens = np.random.default_rng(0).choice(VOCAB, size=500_000, p=weights / weights.sum()).astype(np.uint16)
    tokens.tofile(folder / DATA)
    nano = folder / "data" / "rivals"
    nano.mkdir(parents=True)
    for name in ("train", "val"):
        tokens.tofile(nano / f"{name}.bin")
    (nano / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB}))


def build_other_command(match: Match, path: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return program and environment of the other side, with the sizes of the spec."""
    program = ["-m", "benchmarks.rivals.other_trainer", match.rival, str(path)]
    if match.rival == "nanogpt":
        return [*program, *_build_nanogpt_command(match.spec, path, folder)], {}
    model, config = match.spec.model, folder / "picotron.json"
    config.write_text(json.dumps(_build_picotron_environment(match.spec)))
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    extra = {
        "DTYPE": "float32",
        "HF_TOKEN": "none",
        "RIVALS_CONFIG": json.dumps(sizes),
        "RIVALS_TOKENS": str(folder / DATA),
    }
    return [*program, "--config", str(config)], extra


def _build_nanogpt_command(spec: JobSpec, path: Path, folder: Path) -> list[str]:
    model, train = spec.model, spec.train
    (folder / "configurator.py").write_bytes((path / "configurator.py").read_bytes())  # it is read from where one is
    chosen = {
        "dataset": "rivals",
        "backend": "gloo",
        "device": "cpu",
        "dtype": "float32",
        "compile": train.compile,
        "eval_iters": 1,
        "eval_interval": train.steps,
        "batch_size": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.layout.dp * train.micro_batches,
        "block_size": train.seq_len,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_embd": model.hidden_size,
        "bias": True,
    }
    return [f"--{key}={value}" for key, value in chosen.items()]


def _build_picotron_environment(spec: JobSpec) -> dict[str, Any]:
    layout, train = spec.layout, spec.train
    degrees = {f"{axis}_size": getattr(layout, axis) for axis in ("dp", "pp", "tp", "cp")}
    return {
        "distributed": {**degrees, "pp_engine": "1f1b", "use_cpu": True},
        "model": {"name": "", "use_fused_adam": True},
        "training": {
            "seed": train.seed,
            "learning_rate": train.learning_rate,
            "total_train_steps": train.steps,
            "seq_length": train.seq_len,
            "micro_batch_size": spec.micro_batch_size,
            "gradient_accumulation_steps": train.micro_batches,
            "max_tokens": None,
        },
        "dataset": {"name": "", "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_dir": "", "save_frequency": train.steps, "load_path": ""},
        "logging": {"use_wandb": False, "run_name": ""},
        "environment": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0"},
    }


def play_match(name: str, match: Match, path: Path, blocks: int) -> float:
    """Run turns of both sides, print a line, and return the ratio of tokens/s."""
    with tempfile.TemporaryDirectory() as work:
        folder, spec = Path(work), match.spec
        write_tokens(folder)
        (folder / "spec.json").write_text(spec.model_dump_json())
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        search = {"PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))}
        program, extra = build_other_command(match, path, folder)
        own = ["-m", "benchmarks.rivals.meshboard_trainer", str(folder / "spec.json"), str(folder)]
        gangs = [
            RankGroup("ours", spec.layout.world_size, own, store, folder, {**search, **get_heap_variables()}),
            RankGroup(match.rival, spec.layout.world_size, program, store, folder, {**search, **extra}),
        ]
        try:
            for gang in gangs:  # warm up
                gang.run_turn()
            turns = [[gang.run_turn() for gang in (*gangs, gangs[0])] for _ in range(blocks)]
        finally:
            for gang in gangs:
                gang.stop()
    before, other, after = (_compute_median_s(side) for side in zip(*turns, strict=True))
    own_s, own_processor_s = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    ratio, tokens = other.seconds / own_s, spec.train.global_batch * spec.train.seq_len
    print(
        f"{name:<29}{tokens / own_s:>9,.0f} tokens/s over {tokens / other.seconds:>7,.0f}: {ratio:.2f} (goal "
        f"{match.goal:.1f}); for processor time {other.processor_s / own_processor_s:.2f}; our two turns differ by "
        f"{abs(before.seconds / after.seconds - 1):.1%}",
        flush=True,
    )
    return ratio


def _compute_median_s(steps: Sequence[Step]) -> Step:
    return Step(*map(statistics.median, zip(*steps, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--picotron", type=Path, help="a checkout of huggingface/picotron")
    parser.add_argument("--blocks", type=int, default=8, help="turns of each side")
    parser.add_argument("--only", help="matches whose name holds this")
    options = parser.parse_args()
    paths = {"nanogpt": options.nanogpt, "picotron": options.picotron}
    chosen = {name: m for name, m in MATCHES.items() if paths[m.rival] and (options.only or "") in name}
    if not chosen:
        parser.error("nothing to run: give --nanogpt PATH, --picotron PATH or both")
    for path in filter(None, paths.values()):
        if not (path / "train.py").is_file():
            parser.error(f"{path} has no train.py")
    reached = [play_match(n, m, paths[m.rival].resolve(), options.blocks) >= m.goal for n, m in chosen.items()]
    print(f"{sum(reached)} of {len(reached)} reach their goal")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
