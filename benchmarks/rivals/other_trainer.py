"""Run the train.py of another project on CPU ranks, with replaced lines and stub libraries.

A version in which a replaced line does not occur exactly once is rejected.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.turn_taking import Turns


def main() -> None:
    """Parse `other_trainer.py NAME FOLDER`, followed by arguments of the other train.py."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    lines = {"nanogpt": patch_nanogpt, "picotron": patch_picotron}[name]()
    sys.argv = ["train.py", *sys.argv[3:]]
    source = replace_lines((folder / "train.py").read_text(), lines)
    here = {"__name__": "__main__", "turn": Turns().step}
    exec(compile(source, "train.py", "exec"), here)
    sys.stdout.flush()
    os._exit(0)


def replace_lines(source: str, lines: Mapping[str, str]) -> str:
    for old, new in lines.items():
        if source.count(old) != 1:
            raise SystemExit(f"train.py has {source.count(old)} times, not once: {old}")
        source = source.replace(old, new)
    return source


def patch_nanogpt() -> dict[str, str]:
    """Replace lines that need CUDA for several ranks."""
    return {
        "device = f'cuda:{ddp_local_rank}'": "device = 'cpu'",
        "torch.cuda.set_device(device)": "pass",
        "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
        "while True:": "while turn():",
    }


def patch_picotron() -> dict[str, str]:
    """Replace lines that need the Hugging Face hub or CUDA."""
    for missing in ("wandb", "datasets", "flash_attn"):
        sys.modules[missing] = _StubLibrary(missing)
    for module in ("flash_attn_interface", "layers", "layers.rotary", "ops", "ops.triton", "ops.triton.layer_norm"):
        sys.modules[f"flash_attn.{module}"] = _StubLibrary(module)
    import picotron.checkpoint  # type: ignore[import-not-found]
    import picotron.data  # type: ignore[import-not-found]
    import picotron.utils  # type: ignore[import-not-found]
    import transformers

    transformers.AutoConfig = _EnvironmentConfig  # type: ignore[misc, assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    picotron.data.MicroBatchDataLoader = _TokenFileLoader
    picotron.checkpoint.init_model_with_dematerialized_weights = nullcontext
    picotron.checkpoint.init_model_with_materialized_weights = lambda model, config, save_dir: model
    picotron.utils.download_model = lambda name, token: None
    picotron.utils.get_num_params = lambda model: sum(p.numel() for p in model.parameters())
    ends = (
        'while config["training"]["max_tokens"] is None or trained_tokens < config["training"]["max_tokens"]:',
        'if step >= config["training"]["total_train_steps"]:',
    )
    return dict(zip(ends, ("while turn():", "if False:"), strict=True))


class _StubLibrary(types.ModuleType):
    """A library that is imported but not called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _EnvironmentConfig:
    """A model configuration with the sizes of the environment."""

    @staticmethod
    def from_pretrained(name: str) -> Any:
        return types.SimpleNamespace(**json.loads(os.environ["RIVALS_CONFIG"]))


class _TokenFileLoader:
    """Random sequences of a token file, cut and shifted as picotron's loader does."""

    def __init__(self, micro_batch_size: int, seq_length: int, grad_acc_steps: int, **_others: Any) -> None:
        import picotron.process_group_manager as pgm  # type: ignore[import-not-found]

        manager = pgm.process_group_manager
        self.micro_batch_size, self.seq_length, self.grad_acc_steps = micro_batch_size, seq_length, grad_acc_steps
        self.global_batch_size = micro_batch_size * grad_acc_steps * manager.dp_world_size
        self.seq_length_per_gpu = seq_length // manager.cp_world_size
        self._first = manager.cp_rank * self.seq_length_per_gpu
        self._draws = np.random.default_rng(manager.dp_rank)
        self._tokens = np.memmap(os.environ["RIVALS_TOKENS"], dtype=np.uint16, mode="r")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        starts = self._draws.integers(0, len(self._tokens) - self.seq_length, self.micro_batch_size)
        rows = np.stack([self._tokens[start : start + self.seq_length + 1] for start in starts])
        batch, first, last = torch.from_numpy(rows.astype(np.int64)), self._first, self._first + self.seq_length_per_gpu
        return {
            "input_ids": batch[:, first:last].contiguous(),
            "target_ids": batch[:, first + 1 : last + 1].contiguous(),
            "position_ids": torch.arange(first, last).unsqueeze(0).expand(len(starts), -1).contiguous(),
            "hidden_states": None,
        }


if __name__ == "__main__":
    main()
