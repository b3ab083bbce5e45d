"""The layouts that must equal one process, and the models they are tried on."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.parse import parse_spec
from planner.spec import JobSpec

STEPS = 5

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {
        "arch": "gpt",
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_hidden_size": 256,
        "vocab_size": 256,
        "max_seq_len": 32,
        "tied_embeddings": True,
    },
    "llama": {
        "arch": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 256,
        "max_seq_len": 32,
        "tied_embeddings": False,
    },
}

# name -> (layout, micro-batches). Names read like the layout.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp2": ({"dp": 2}, 1),
    "dp2 m4": ({"dp": 2}, 4),
    "zero1 dp2": ({"dp": 2, "zero": 1}, 2),
    "zero2 dp2": ({"dp": 2, "zero": 2}, 2),
    "zero3 dp2": ({"dp": 2, "zero": 3}, 2),
    "tp2": ({"tp": 2}, 2),
    "tp2 sp": ({"tp": 2, "sequence_parallel": True}, 2),
    "pp2 gpipe": ({"pp": 2, "schedule": "gpipe"}, 4),
    "pp2 1f1b": ({"pp": 2}, 4),
    "dp4": ({"dp": 4}, 1),
    "zero1 dp4": ({"dp": 4, "zero": 1}, 1),
    "zero2 dp4": ({"dp": 4, "zero": 2}, 2),
    "zero3 dp4": ({"dp": 4, "zero": 3}, 2),
    "tp4": ({"tp": 4}, 1),
    "tp4 sp": ({"tp": 4, "sequence_parallel": True}, 1),
    "pp4 gpipe": ({"pp": 4, "schedule": "gpipe"}, 4),
    "pp4 1f1b": ({"pp": 4}, 8),
    "pp3 uneven": ({"pp": 3}, 4),
    "pp3 uneven x zero1 dp2": ({"pp": 3, "dp": 2, "zero": 1}, 4),
    "pp3 uneven x zero2 dp2": ({"pp": 3, "dp": 2, "zero": 2}, 4),
    "pp3 uneven x zero3 dp2": ({"pp": 3, "dp": 2, "zero": 3}, 4),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, 2),
    "zero1 dp2 x tp2": ({"dp": 2, "tp": 2, "zero": 1}, 2),
    "zero3 dp2 x tp2 sp": ({"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, 2),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, 2),
    "pp2 gpipe x zero3 dp2": ({"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe"}, 2),
    "pp2 x zero3 dp2": ({"pp": 2, "dp": 2, "zero": 3}, 4),
    "pp2 x tp2 sp": ({"pp": 2, "tp": 2, "sequence_parallel": True}, 2),
    "pp2 x dp2 x tp2": ({"pp": 2, "dp": 2, "tp": 2}, 2),
    "pp2 x zero2 dp2 x tp2 sp": ({"pp": 2, "dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True}, 2),
    "pp2 x zero3 dp2 x tp2 sp": ({"pp": 2, "dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, 2),
}

# What the default suite runs: each axis and setting once, and a triple.
CORE = (
    "dp2 m4",
    "zero1 dp2",
    "zero2 dp2",
    "zero3 dp2",
    "tp2",
    "tp2 sp",
    "pp2 gpipe",
    "pp2 1f1b",
    "pp3 uneven",
    "dp4",
    "zero1 dp4",
    "zero2 dp4",
    "zero3 dp4",
    "dp2 x tp2",
    "zero3 dp2 x tp2 sp",
    "pp2 x dp2",
    "pp2 x zero3 dp2",
    "pp3 uneven x zero1 dp2",
    "pp2 x zero2 dp2 x tp2 sp",
)


class Case(NamedTuple):
    """One layout on one model."""

    arch: str
    name: str

    @property
    def spec(self) -> JobSpec:
        layout, micro_batches = LAYOUTS[self.name]
        return make_spec(self.arch, layout, micro_batches)

    @property
    def label(self) -> str:
        return f"{self.arch} {self.name}"


def make_spec(arch: str, layout: dict[str, Any], micro_batches: int) -> JobSpec:
    """A parity spec. Clipping and weight decay are on, so the updates test them too."""
    train = {
        "steps": STEPS,
        "global_batch": 8,
        "micro_batches": micro_batches,
        "seq_len": 32,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "grad_clip": 1.0,
        "eval_every": 3,
    }
    return parse_spec({"model": SIZES[arch], "layout": layout, "train": train})


def reference_spec(arch: str) -> JobSpec:
    """The same on one process."""
    return make_spec(arch, {}, 1)


def all_cases(names: tuple[str, ...] = tuple(LAYOUTS)) -> list[Case]:
    return [Case(arch, name) for arch in SIZES for name in names]
