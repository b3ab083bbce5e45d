"""Layouts that must match a single-process reference, and their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec

STEPS = 5
# All cases use the same tokens. Adam takes a full step for gradients that are only rounding, so on some texts norms
# differ by 1e-4 after some steps while each gradient is right.
DATA = "parity.bin"

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
    "moe": {
        "arch": "llama",
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 64,
        "vocab_size": 256,
        "max_seq_len": 32,
        "tied_embeddings": False,
        "moe": {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 48},
    },
}
# Additional models for features that only some layouts use.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "one kv head": {"num_kv_heads": 1},
    "8 layers": {"num_layers": 8},
    "stretched": {"rope_base": 500_000.0, "rope_scaling": {"factor": 8.0, "original_max_seq_len": 16}},
    # The head weighs as much as two layers.
    "thin": {"num_layers": 8, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 32},
    "capacity": {
        "moe": {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 48, "capacity_factor": 1.0}
    },
    "mixed layers": {
        "moe": {
            "num_experts": 4,
            "experts_per_token": 2,
            "expert_ffn_hidden_size": 48,
            "dense_layers": 1,
            "shared_experts": 1,
            "capacity_factor": 1.25,
        }
    },
    "mixed layers, dropless": {
        "moe": {
            "num_experts": 4,
            "experts_per_token": 2,
            "expert_ffn_hidden_size": 48,
            "dense_layers": 1,
            "shared_experts": 1,
        }
    },
    # The vocabulary is padded to 512 rows. With tp 4, the last rank has only padding of the first model.
    "vocabulary of 257": {"vocab_size": 257},
    "vocabulary of 510": {"vocab_size": 510},
    "documents": {},
    # Fewer than the ranks that ZeRO divides them over.
    "three experts": {"moe": {"num_experts": 3, "experts_per_token": 2, "expert_ffn_hidden_size": 48}},
}

# Settings that also change the reference. An end token is in every second or third sequence. In documents of few
# tokens, gradients of queries and keys are almost zero, and norms differ by 1e-5 after some steps.
TRAINED: dict[str, dict[str, Any]] = {"documents": {"document_end": 5}}

SP = {"sequence_parallel": True}
KEPT: dict[str, Any] = {"zero": 3, "keep_gathered": True}
V2 = {"virtual_stages": 2}
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
V = ("zbv", "dualpipev")
BOTH = ("gpt", "llama")
ALL = (*BOTH, "moe")


class Try(NamedTuple):
    """A layout with its micro-batches, models, and other settings."""

    layout: dict[str, Any]
    micro_batches: int
    archs: tuple[str, ...] = BOTH
    variant: str = ""
    train: dict[str, Any] = {}


def chunked(pp: int, schedule: str, **more: Any) -> dict[str, Any]:
    return {"pp": pp, "schedule": schedule, **V2, **more}


# Names read like the layout.
LAYOUTS: dict[str, Try] = {
    # data
    "dp2": Try({"dp": 2}, 1),
    "dp2 m4": Try({"dp": 2}, 4),
    "dp2 m4 no overlap": Try({"dp": 2}, 4, train={"overlap": False}),
    "zero1 dp2": Try({"dp": 2, "zero": 1}, 2),
    "zero2 dp2": Try({"dp": 2, "zero": 2}, 2),
    "zero3 dp2": Try({"dp": 2, "zero": 3}, 2),
    "dp4": Try({"dp": 4}, 1),
    "zero1 dp4": Try({"dp": 4, "zero": 1}, 1),
    "zero2 dp4": Try({"dp": 4, "zero": 2}, 2),
    "zero3 dp4": Try({"dp": 4, "zero": 3}, 2),
    "hsdp zero1 2x2": Try({"dp": 4, "zero": 1, "dp_replicas": 2}, 2),
    "hsdp zero2 2x2": Try({"dp": 4, "zero": 2, "dp_replicas": 2}, 2),
    "hsdp zero3 2x2": Try({"dp": 4, "zero": 3, "dp_replicas": 2}, 2),
    # tensor
    "tp2": Try({"tp": 2}, 2, ALL),
    "tp2 sp": Try({"tp": 2, **SP}, 2, ALL),
    "tp2 sp regather": Try({"tp": 2, **SP, "regather": True}, 2),
    "tp4": Try({"tp": 4}, 1),
    "tp4 sp": Try({"tp": 4, **SP}, 1),
    "tp2 one kv head": Try({"tp": 2}, 2, ("llama",), "one kv head"),
    "tp4 sp one kv head": Try({"tp": 4, **SP}, 2, ("llama",), "one kv head"),
    "zero3 dp2 x tp2 one kv head": Try({"dp": 2, "tp": 2, "zero": 3}, 2, ("llama",), "one kv head"),
    "tp4 sp vocabulary of 257": Try({"tp": 4, **SP}, 2, BOTH, "vocabulary of 257"),
    "zero3 dp2 x tp4 vocabulary of 510": Try({"dp": 2, "tp": 4, "zero": 3}, 2, BOTH, "vocabulary of 510"),
    "pp2 zbv x tp4 vocabulary of 510": Try(chunked(2, "zbv", tp=4), 4, BOTH, "vocabulary of 510"),
    "pp2 x tp4 vocabulary of 510": Try({"pp": 2, "tp": 4}, 2, ("gpt",), "vocabulary of 510"),
    # pipeline
    "pp2 naive": Try({"pp": 2, "schedule": "naive"}, 2),
    "pp2 gpipe": Try({"pp": 2, "schedule": "gpipe"}, 4),
    "pp2 1f1b": Try({"pp": 2}, 4),
    "pp4 gpipe": Try({"pp": 4, "schedule": "gpipe"}, 4),
    "pp4 1f1b": Try({"pp": 4}, 8),
    "pp3 uneven": Try({"pp": 3}, 4),
    **{f"pp2 {s}": Try(chunked(2, s), 4) for s in (*LOOPED, *V)},
    **{f"pp4 {s}": Try(chunked(4, s), 8, BOTH, "8 layers") for s in (*LOOPED, *V)},
    "pp2 zero bubble, one chunk": Try({"pp": 2, "schedule": "interleaved_zero_bubble"}, 4),
    "pp2 by cost": Try({"pp": 2, "balance": "cost"}, 4, BOTH, "thin"),
    "pp2 zbv by cost x zero2 dp2": Try(chunked(2, "zbv", balance="cost", dp=2, zero=2), 4, BOTH, "thin"),
    # context
    "cp2 ring": Try({"cp": 2}, 2, ALL),
    "cp2 all-gather": Try({"cp": 2, "cp_method": "all_gather"}, 2),
    "cp2 ring stretched": Try({"cp": 2}, 2, ("llama",), "stretched"),
    "cp4 ring": Try({"cp": 4}, 1),
    "cp4 all-gather": Try({"cp": 4, "cp_method": "all_gather"}, 1),
    # experts
    "ep2": Try({"dp": 2, "ep": 2}, 2, ("moe",)),
    "ep4": Try({"dp": 4, "ep": 4}, 1, ("moe",)),
    "ep2 x dp2": Try({"dp": 4, "ep": 2}, 2, ("moe",)),
    "ep2 capacity": Try({"dp": 2, "ep": 2}, 2, ("moe",), "capacity"),
    "zero1 ep2 x dp2": Try({"dp": 4, "ep": 2, "zero": 1}, 2, ("moe",)),
    "zero2 ep2": Try({"dp": 2, "ep": 2, "zero": 2}, 2, ("moe",)),
    "zero3 ep2 x dp2": Try({"dp": 4, "ep": 2, "zero": 3}, 2, ("moe",)),
    **{f"zero{z} dp4 three experts": Try({"dp": 4, "zero": z}, 2, ("moe",), "three experts") for z in (1, 2, 3)},
    "hsdp zero3 over cp three experts": Try(
        {"dp": 4, "cp": 2, "zero": 3, "dp_replicas": 2}, 2, ("moe",), "three experts"
    ),
    "zero2 dp4 three experts zbv": Try(chunked(2, "zbv", dp=4, zero=2), 2, ("moe",), "three experts"),
    "ep2 x tp2": Try({"dp": 2, "ep": 2, "tp": 2}, 2, ("moe",)),
    "ep2 x tp2 sp": Try({"dp": 2, "ep": 2, "tp": 2, **SP}, 2, ("moe",)),
    "ep2 x cp2": Try({"cp": 2, "ep": 2}, 2, ("moe",)),
    "ep2 x pp2": Try({"dp": 2, "ep": 2, "pp": 2}, 2, ("moe",)),
    "ep2 x pp2 zbv": Try(chunked(2, "zbv", dp=2, ep=2), 4, ("moe",)),
    "ep2 x dp2 full recompute": Try({"dp": 2, "ep": 2, "recompute": "full"}, 2, ("moe",)),
    "zero3 ep2 x dp2 x tp2": Try({"dp": 4, "ep": 2, "tp": 2, "zero": 3}, 2, ("moe",)),
    "ep2 x dp2 mixed layers": Try({"dp": 4, "ep": 2}, 2, ("moe",), "mixed layers"),
    "zero3 ep2 x dp2 x tp2 sp mixed layers": Try(
        {"dp": 4, "ep": 2, "tp": 2, "zero": 3, **SP}, 2, ("moe",), "mixed layers"
    ),
    "ep2 x cp2 x pp2 mixed layers": Try({"dp": 2, "cp": 2, "ep": 2, "pp": 2}, 2, ("moe",), "mixed layers, dropless"),
    # recompute and attention
    "full recompute": Try({"recompute": "full"}, 2, ALL),
    "selective recompute": Try({"recompute": "selective"}, 2, ALL),
    "tp2 full recompute": Try({"tp": 2, "recompute": "full"}, 2),
    "tp2 sp full recompute": Try({"tp": 2, **SP, "recompute": "full"}, 2),
    "tp2 sp selective regather": Try({"tp": 2, **SP, "recompute": "selective", "regather": True}, 2),
    "zero3 dp2 full recompute": Try({"dp": 2, "zero": 3, "recompute": "full"}, 2),
    "cp2 ring full recompute": Try({"cp": 2, "recompute": "full"}, 2),
    "pp2 zbv full recompute": Try(chunked(2, "zbv", recompute="full"), 4),
    "tp2 unfused": Try({"tp": 2}, 2, train={"attention": "unfused"}),
    "unfused selective": Try({"recompute": "selective"}, 2, train={"attention": "unfused"}),
    # attention within documents
    "documents": Try({}, 2, ALL, "documents"),
    "documents unfused selective": Try({"recompute": "selective"}, 2, BOTH, "documents", {"attention": "unfused"}),
    "documents dp2 x tp2 sp selective": Try(
        {"dp": 2, "tp": 2, **SP, "recompute": "selective", "regather": True}, 2, BOTH, "documents"
    ),
    "documents cp2 ring": Try({"cp": 2}, 2, ALL, "documents"),
    "documents cp4 ring": Try({"cp": 4}, 1, BOTH, "documents"),
    "documents cp4 all-gather": Try({"cp": 4, "cp_method": "all_gather"}, 1, BOTH, "documents"),
    "documents cp2 x pp2 full": Try({"cp": 2, "pp": 2, "recompute": "full"}, 2, BOTH, "documents"),
    "documents pp2 zbv x zero2 dp2": Try(chunked(2, "zbv", dp=2, zero=2), 4, BOTH, "documents"),
    # compiled blocks
    "compiled": Try({}, 2, train={"compile": True}),
    "compiled pp2 full recompute": Try({"pp": 2, "recompute": "full"}, 2, train={"compile": True}),
    "compiled zero3 dp2 x tp2 sp": Try({"dp": 2, "tp": 2, "zero": 3, **SP}, 2, train={"compile": True}),
    # pairs
    "dp2 x tp2": Try({"dp": 2, "tp": 2}, 2),
    "zero1 dp2 x tp2": Try({"dp": 2, "tp": 2, "zero": 1}, 2),
    "zero2 dp2 x tp2 sp": Try({"dp": 2, "tp": 2, "zero": 2, **SP}, 2),
    "zero3 dp2 x tp2 sp": Try({"dp": 2, "tp": 2, "zero": 3, **SP}, 2),
    "pp2 x dp2": Try({"pp": 2, "dp": 2}, 2),
    "pp2 x zero1 dp2": Try({"pp": 2, "dp": 2, "zero": 1}, 2),
    "pp2 gpipe x zero3 dp2": Try({"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe"}, 2),
    "pp2 x zero3 dp2": Try({"pp": 2, "dp": 2, "zero": 3}, 4),
    "pp2 kept x zero3 dp2": Try({"pp": 2, "dp": 2, **KEPT}, 4, ALL),
    "pp2 kept zero bubble x zero3 dp2": Try({"pp": 2, "dp": 2, **KEPT, "schedule": "interleaved_zero_bubble"}, 4),
    "pp2 kept looped_bfs x zero3 dp2": Try(chunked(2, "looped_bfs", dp=2, **KEPT), 4, ALL),
    "pp2 kept bfs x zero3 dp2 x tp2 sp full": Try(
        chunked(2, "looped_bfs", dp=2, tp=2, **SP, **KEPT, recompute="full"), 4
    ),
    "pp2 kept looped_bfs x hsdp zero3 2x2": Try(chunked(2, "looped_bfs", dp=4, dp_replicas=2, **KEPT), 2),
    "pp2 kept looped_bfs x zero3 ep2 x dp2": Try(chunked(2, "looped_bfs", dp=4, ep=2, **KEPT), 2, ("moe",)),
    "pp3 uneven x zero1 dp2": Try({"pp": 3, "dp": 2, "zero": 1}, 4),
    "pp3 uneven x zero2 dp2": Try({"pp": 3, "dp": 2, "zero": 2}, 4),
    "pp3 uneven x zero3 dp2": Try({"pp": 3, "dp": 2, "zero": 3}, 4),
    "pp2 x tp2": Try({"pp": 2, "tp": 2}, 2),
    "pp2 x tp2 sp": Try({"pp": 2, "tp": 2, **SP}, 2),
    "pp2 x tp2 scatter-gather": Try({"pp": 2, "tp": 2, "scatter_gather": True}, 2),
    "cp2 ring x dp2": Try({"cp": 2, "dp": 2}, 2),
    "cp2 ring x zero3 dp2": Try({"cp": 2, "dp": 2, "zero": 3}, 2),
    "cp2 all-gather x zero1": Try({"cp": 2, "zero": 1, "cp_method": "all_gather"}, 2),
    "cp2 ring x tp2": Try({"cp": 2, "tp": 2}, 2),
    "cp2 all-gather x tp2 sp": Try({"cp": 2, "tp": 2, **SP, "cp_method": "all_gather"}, 2),
    "cp2 ring x pp2": Try({"cp": 2, "pp": 2}, 2),
    **{f"pp2 {s} x dp2": Try(chunked(2, s, dp=2), 4) for s in (*LOOPED, *V)},
    **{f"pp2 {s} x zero{z} dp2": Try(chunked(2, s, dp=2, zero=z), 4) for s in (*LOOPED, *V) for z in (1, 2, 3)},
    **{f"pp2 {s} x tp2 sp": Try(chunked(2, s, tp=2, **SP), 4) for s in (*LOOPED, *V)},
    **{f"pp2 {s} x cp2": Try(chunked(2, s, cp=2), 4) for s in (*LOOPED, *V)},
    # triples
    "pp2 x dp2 x tp2": Try({"pp": 2, "dp": 2, "tp": 2}, 2),
    "pp2 x zero2 dp2 x tp2 sp": Try({"pp": 2, "dp": 2, "tp": 2, "zero": 2, **SP}, 2),
    "pp2 x zero3 dp2 x tp2 sp": Try({"pp": 2, "dp": 2, "tp": 2, "zero": 3, **SP}, 2),
    "cp2 x dp2 x tp2 sp": Try({"cp": 2, "dp": 2, "tp": 2, **SP}, 2),
    "cp2 x zero3 dp2 x tp2": Try({"cp": 2, "dp": 2, "tp": 2, "zero": 3}, 2),
    "cp2 all-gather x pp2 x tp2 sp": Try({"cp": 2, "pp": 2, "tp": 2, **SP, "cp_method": "all_gather"}, 2),
    "cp2 x pp2 x zero2 dp2": Try({"cp": 2, "pp": 2, "dp": 2, "zero": 2}, 2),
    "hsdp zero3 2x2 x tp2": Try({"dp": 4, "zero": 3, "dp_replicas": 2, "tp": 2}, 2),
    "hsdp zero2 2x2 x pp2": Try({"dp": 4, "zero": 2, "dp_replicas": 2, "pp": 2}, 2),
    "hsdp zero3 over cp": Try({"dp": 2, "cp": 2, "zero": 3, "dp_replicas": 2}, 2),
    "pp2 interleaved_1f1b x dp2 x tp2 sp": Try(chunked(2, "interleaved_1f1b", dp=2, tp=2, **SP), 4),
    "pp2 zbv x zero1 dp2 x tp2": Try(chunked(2, "zbv", dp=2, tp=2, zero=1), 4),
    "pp2 dualpipev x zero2 dp2 x cp2": Try(chunked(2, "dualpipev", dp=2, cp=2, zero=2), 4),
    "pp2 zero bubble x cp2 x tp2 sp": Try(chunked(2, "interleaved_zero_bubble", cp=2, tp=2, **SP), 4),
    "ep2 x dp2 x cp2": Try({"dp": 2, "cp": 2, "ep": 2}, 2, ("moe",)),
    "ep2 x pp2 x tp2 sp": Try({"dp": 2, "ep": 2, "pp": 2, "tp": 2, **SP}, 2, ("moe",)),
}

# Cases of the default suite. `make parity` runs all. Tensor and pipeline parallelism run on every model. Each other
# axis, each basic schedule, each setting, some pairs, and two triples run on one model.
CORE = ("tp2 sp", "pp2 1f1b")
CORE_ONCE = (
    "dp2 m4",
    "zero1 dp2",
    "zero2 dp2",
    "zero3 dp2",
    "hsdp zero3 2x2",
    "tp4 sp one kv head",
    "tp4 sp vocabulary of 257",
    "pp3 uneven",
    "pp2 interleaved_1f1b",
    "pp2 dualpipev",
    "cp2 ring",
    "cp4 all-gather",
    "documents cp2 ring",
    "ep2",
    "ep2 x dp2 mixed layers",
    "zero3 ep2 x dp2",
    "zero3 dp4 three experts",
    "tp2 sp full recompute",
    "tp2 sp selective regather",
    "dp2 x tp2",
    "zero3 dp2 x tp2 sp",
    "pp2 x zero3 dp2",
    "pp2 kept looped_bfs x zero3 dp2",
    "pp2 x tp2 scatter-gather",
    "pp2 interleaved_zero_bubble x dp2",
    "pp2 zbv x zero2 dp2",
    "cp2 all-gather x tp2 sp",
    "ep2 x tp2 sp",
    "pp3 uneven x zero1 dp2",
    "pp2 x zero2 dp2 x tp2 sp",
)


def write_data(root: Path) -> None:
    """Write tokens with different frequencies, as in text."""
    weights = 1 / np.arange(1, 257)
    tokens = np.random.default_rng(0).choice(256, size=50_000, p=weights / weights.sum())
    tokens.astype(np.uint16).tofile(root / DATA)


class Case(NamedTuple):
    """A layout with a model."""

    arch: str
    name: str

    @property
    def spec(self) -> JobSpec:
        return self.make_spec("fp32")

    def make_spec(self, precision: str) -> JobSpec:
        tried = LAYOUTS[self.name]
        train = {**tried.train, "precision": precision}
        return make_spec(self.arch, tried.layout, tried.micro_batches, tried.variant, train)

    @property
    def label(self) -> str:
        return f"{self.arch} {self.name}"

    @property
    def reference(self) -> tuple[str, str]:
        """Model of the single-process reference."""
        return self.arch, LAYOUTS[self.name].variant


def make_spec(
    arch: str, layout: dict[str, Any], micro_batches: int, variant: str = "", train: dict[str, Any] | None = None
) -> JobSpec:
    """Return a parity spec. Clipping and weight decay are on, because the updates then test them too."""
    train = {
        "steps": STEPS,
        "global_batch": 8,
        "micro_batches": micro_batches,
        "seq_len": 32,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "grad_clip": 1.0,
        "eval_every": 3,
        "data": DATA,
        **TRAINED.get(variant, {}),
        **(train or {}),
    }
    return parse_spec({"model": SIZES[arch] | VARIANTS[variant], "layout": layout, "train": train})


def reference_spec(arch: str, variant: str) -> JobSpec:
    """Return the spec of the single-process reference."""
    return make_spec(arch, {}, 1, variant)


def all_cases(names: tuple[str, ...] = tuple(LAYOUTS)) -> list[Case]:
    return [Case(arch, name) for name in names for arch in LAYOUTS[name].archs]


def core_cases() -> list[Case]:
    """Return the cases of the default suite."""
    return [*all_cases(CORE), *(Case(LAYOUTS[name].archs[-1], name) for name in CORE_ONCE)]
