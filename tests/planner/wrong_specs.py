"""Specs that cannot run: the change to a valid spec, the field of the problem, and words of its message."""

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
    """Replace the value at the dotted `path` with `value`."""

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
        (0, "is 0. Use at least 1."),
        (-1, "is -1. Use at least 1."),
        (10**9, "Use at most 65536."),
        (2**64, "Use at most 65536."),
        (True, "is true. Use a whole number."),
        ("4", 'is "4". Use a whole number.'),
        (1.5, "is 1.5. Use a whole number."),
        (None, "is null. Use a whole number."),
        ([2], "is a list. Use a whole number."),
    )
]

FIELDS = [
    Wrong("layout.zero", 4, "layout.zero", "`layout.zero` is 4. Use at most 3."),
    Wrong("layout.keep_gathered", "yes", "layout.keep_gathered", "true or false"),
    Wrong("layout.schedule", "zigzag", "layout.schedule", "'gpipe', '1f1b', "),
    Wrong("layout.sequence_parallel", "yes", "layout.sequence_parallel", "true or false"),
    Wrong("layout.sp", 2, "layout.sp", "not a known field"),
    Wrong("layout", 3, "layout", "Use an object."),
    Wrong("model.rope_base", 500_000.0, "model.rope_base", "gpt has learned positions"),
    Wrong(
        "model.rope_scaling",
        {"factor": 8.0, "original_max_seq_len": 64},
        "model.rope_scaling",
        "gpt has learned positions",
    ),
    Wrong(
        "model",
        {
            "preset": "llama-tiny",
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 1.0, "original_max_seq_len": 64},
        },
        "model.rope_scaling",
        "high_freq_factor 1. Use more than low_freq_factor 1.",
    ),
    Wrong("model", "gpt-tiny", "model", "Use an object."),
    Wrong("model", {}, "model.arch", "`model.arch` is missing. Add it."),
    Wrong("model.preset", "gpt-9", "model.preset", '"gpt-9", which is unknown. Use a preset such as '),
    Wrong("model.preset", 7, "model.preset", "Use text."),
    Wrong("model.vocab_size", 100, "model.vocab_size", "is 100. Use at least 256."),
    Wrong("train.steps", 0, "train.steps", "is 0. Use at least 1."),
    Wrong("train.steps", 1e9, "train.steps", "whole number"),
    Wrong("train.learning_rate", 0, "train.learning_rate", "Use more than 0."),
    Wrong("train.learning_rate", "fast", "train.learning_rate", "Use a number."),
    Wrong("train.grad_clip", -1, "train.grad_clip", "Use at least 0."),
    Wrong("train.seed", -1, "train.seed", "Use at least 0."),
    Wrong("train.precision", "fp4", "train.precision", "'fp32', 'bf16', "),
    Wrong("train.data", "", "train.data", "Use 1 character or more."),
    Wrong("train.data", "/etc/passwd", "train.data", "outside the data root. Use a path below it"),
    Wrong("train.data", "a/../../b", "train.data", "outside the data root. Use a path below it"),
    Wrong("train.data", "a\x00b", "train.data", "NUL"),
    Wrong("train.data", "a.txt\n", "train.data", "'a.txt\\n', which contains a control character"),
    Wrong("train.data", "-c", "train.data", "starts with '-', like a command-line option"),
    Wrong("train.tokenizer", "/a.json", "train.tokenizer", "outside the data root. Use a path below it"),
    Wrong("train.tokenizer", "a.json\x1b", "train.tokenizer", "contains a control character"),
    Wrong("train.tokenizer", "a/", "train.tokenizer", "'a/', which is a folder. Use a file in it."),
    Wrong("train.tokenizer", ".", "train.tokenizer", "which is a folder"),
    Wrong("train.resume", "../x", "train.resume", "outside the checkpoint root. Use job, job/attempt, or"),
    Wrong("train.resume", "abc\n", "train.resume", "contains a control character"),
    Wrong("train.resume", "-abc", "train.resume", "starts with '-'"),
    Wrong("train.tokenizer", "a\x00b", "train.tokenizer", "NUL"),
    Wrong("name", "", "name", "Use 1 character or more."),
    Wrong("name", "x" * 101, "name", "at most 100 characters"),
    Wrong("name", "a\x00b", "name", "control characters"),
    Wrong("resources.device", "tpu", "resources.device", "'cpu' or 'cuda'"),
    Wrong("version", 2, "version", "Use 1."),
]

ARITHMETIC = [
    Wrong("layout.tp", 3, "layout.tp", "`layout.tp` is 3, but 4 heads are not divisible by 3. Use 1, 2 or 4."),
    Wrong("layout.pp", 8, "layout.pp", "`layout.pp` is 8, but the model has 4 layers. Use at most 4."),
    Wrong(
        "layout.pp", 4, "train.micro_batches", "`train.micro_batches` is 2, but 1F1B on pp 4 needs 4. Use 4 or more."
    ),
    Wrong(
        "layout.dp", 3, "train.global_batch", "is 8, which is not divisible by dp 3 x micro_batches 2 = 6. Use 6 or 12."
    ),
    Wrong("layout", {"dp": 1, "zero": 2}, "layout.zero", "dp is 1. Use 0, or set dp to 2 or more."),
    Wrong("layout", {"sequence_parallel": True}, "layout.sequence_parallel", "tp is 1. Set tp to 2 or more"),
    Wrong(
        "model.hidden_size",
        130,
        "model.num_heads",
        "`model.num_heads` is 4, but hidden_size 130 is not divisible by 4. Use 1, 2, 5, 10",
    ),
    Wrong(
        "model.ffn_hidden_size",
        301,
        "layout.tp",
        "`layout.tp` is 2, but ffn_hidden_size 301 is not divisible by 2. Use 1.",
    ),
    Wrong("model.num_kv_heads", 2, "model.num_kv_heads", "is 2, but gpt has one key/value head per query head. Use 4."),
    Wrong("train.seq_len", 513, "train.seq_len", "`train.seq_len` is 513. Use at most the model's max_seq_len 512."),
    Wrong("train.warmup_steps", 21, "train.warmup_steps", "but `train.steps` is 20. Use at most 20."),
    Wrong("train.micro_batches", 3, "train.global_batch", "Use 6 or 12."),
]

WRONG_SPECS = [*NUMBERS, *FIELDS, *ARITHMETIC]
