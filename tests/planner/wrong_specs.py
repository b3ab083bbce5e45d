"""Specs that cannot run: what is changed in a good one, the field that must be named, and words its message needs."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

GOOD: dict[str, Any] = {
    "name": "good",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"global_batch": 8, "micro_batches": 2, "seq_len": 128, "steps": 20},
}


class Wrong(NamedTuple):
    """`path` is dotted; `value` replaces what is there."""

    path: str
    value: Any
    field: str
    words: str

    @property
    def label(self) -> str:
        return f"{self.path}={str(self.value)[:24]!r}"

    @property
    def spec(self) -> Any:
        changed = copy.deepcopy(GOOD)
        *parents, last = self.path.split(".")
        target = changed
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = self.value
        return changed


NUMBERS = [
    Wrong(f"layout.{axis}", value, f"layout.{axis}", words)
    for axis in ("dp", "pp", "tp")
    for value, words in (
        (0, "at least 1, got 0"),
        (-1, "at least 1, got -1"),
        (10**9, "at most 65536"),
        (2**64, "at most 65536"),
        (True, "whole number, got true"),
        ("4", 'whole number, got "4"'),
        (1.5, "whole number, got 1.5"),
        (None, "whole number, got null"),
        ([2], "whole number, got a list"),
    )
]

FIELDS = [
    Wrong("layout.zero", 4, "layout.zero", "at most 3, got 4"),
    Wrong("layout.keep_gathered", "yes", "layout.keep_gathered", "true or false"),
    Wrong("layout.schedule", "zigzag", "layout.schedule", "'gpipe', '1f1b', "),
    Wrong("layout.sequence_parallel", "yes", "layout.sequence_parallel", "true or false"),
    Wrong("layout.sp", 2, "layout.sp", "not a known field"),
    Wrong("layout", 3, "layout", "must be an object"),
    Wrong("model.rope_base", 500_000.0, "model.rope_base", "gpt learns its positions"),
    Wrong("model.rope_scaling", {"factor": 8.0, "original_max_seq_len": 64}, "model.rope_scaling", "gpt learns"),
    Wrong(
        "model",
        {
            "preset": "llama-tiny",
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 1.0, "original_max_seq_len": 64},
        },
        "model.rope_scaling",
        "high_freq_factor 1 <= low_freq_factor 1",
    ),
    Wrong("model", "gpt-tiny", "model", "must be an object"),
    Wrong("model", {}, "model.arch", "is required"),
    Wrong("model.preset", "gpt-9", "model.preset", "there is no preset"),
    Wrong("model.preset", 7, "model.preset", "must be text"),
    Wrong("model.vocab_size", 100, "model.vocab_size", "at least 256, got 100"),
    Wrong("train.steps", 0, "train.steps", "at least 1, got 0"),
    Wrong("train.steps", 1e9, "train.steps", "whole number"),
    Wrong("train.learning_rate", 0, "train.learning_rate", "more than 0"),
    Wrong("train.learning_rate", "fast", "train.learning_rate", "must be a number"),
    Wrong("train.grad_clip", -1, "train.grad_clip", "at least 0"),
    Wrong("train.seed", -1, "train.seed", "at least 0"),
    Wrong("train.precision", "fp4", "train.precision", "'fp32', 'bf16', "),
    Wrong("train.data", "", "train.data", "at least 1 character"),
    Wrong("train.data", "/etc/passwd", "train.data", "leaves the data root"),
    Wrong("train.data", "a/../../b", "train.data", "leaves the data root"),
    Wrong("train.data", "a\x00b", "train.data", "NUL"),
    Wrong("train.data", "a.txt\n", "train.data", "'a.txt\\n' holds a control character"),
    Wrong("train.data", "-c", "train.data", "begins with '-', as an option does"),
    Wrong("train.tokenizer", "/a.json", "train.tokenizer", "leaves the data root"),
    Wrong("train.tokenizer", "a.json\x1b", "train.tokenizer", "holds a control character"),
    Wrong("train.tokenizer", "a/", "train.tokenizer", "'a/' is a folder; name the file in it"),
    Wrong("train.tokenizer", ".", "train.tokenizer", "is a folder"),
    Wrong("train.resume", "../x", "train.resume", "leaves the checkpoint root; give job, job/attempt or"),
    Wrong("train.resume", "abc\n", "train.resume", "holds a control character"),
    Wrong("train.resume", "-abc", "train.resume", "begins with '-'"),
    Wrong("train.tokenizer", "a\x00b", "train.tokenizer", "NUL"),
    Wrong("name", "", "name", "at least 1 character"),
    Wrong("name", "x" * 101, "name", "at most 100 characters"),
    Wrong("name", "a\x00b", "name", "control characters"),
    Wrong("resources.device", "tpu", "resources.device", "'cpu' or 'cuda'"),
    Wrong("version", 2, "version", "must be 1"),
]

ARITHMETIC = [
    Wrong("layout.tp", 3, "layout.tp", "num_heads 4 is not divisible by tp 3: 4 = 1 x 3 + 1"),
    Wrong("layout.pp", 8, "layout.pp", "pp 8 stages need a layer each, and num_layers is 4"),
    Wrong("layout.pp", 4, "train.micro_batches", "1F1B needs 4 micro-batches or more on pp 4: 2 micro-batches < 4"),
    Wrong("layout.dp", 3, "train.global_batch", "dp 3 x micro_batches 2 = 6: 8 = 1 x 6 + 2"),
    Wrong("layout", {"dp": 1, "zero": 2}, "layout.zero", "dp, which is 1"),
    Wrong("layout", {"sequence_parallel": True}, "layout.sequence_parallel", "tp, which is 1"),
    Wrong("model.hidden_size", 130, "model.num_heads", "hidden_size 130 is not divisible by num_heads 4"),
    Wrong("model.ffn_hidden_size", 301, "layout.tp", "ffn_hidden_size 301 is not divisible by tp 2"),
    Wrong("model.num_kv_heads", 2, "model.num_kv_heads", "2 is not 4"),
    Wrong("train.seq_len", 513, "train.seq_len", "seq_len 513 is longer than the model's max_seq_len 512"),
    Wrong("train.warmup_steps", 21, "train.warmup_steps", "warmup_steps 21 > steps 20"),
    Wrong("train.micro_batches", 3, "train.global_batch", "8 = 1 x 6 + 2"),
]

WRONG_SPECS = [*NUMBERS, *FIELDS, *ARITHMETIC]
