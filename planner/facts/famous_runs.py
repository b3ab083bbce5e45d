"""List large published training runs with their layouts and their published speed.

The templates and a test of the predictions read this table. Figures are from the source of each run.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Figure = Literal["step_s", "mfu", "hfu"]


class FamousRun(NamedTuple):
    """Published run of a model preset.

    Args:
        batch: Sequences per step.
        figure: Published quantity: seconds per step, or model or hardware FLOPs over the dense peak.
        value: Published value of `figure`.
        twin: Model preset and layout of a small copy for CPU ranks.
    """

    title: str
    source: str
    preset: str
    cluster: str
    layout: dict[str, Any]
    batch: int
    micro_batch: int
    seq_len: int
    figure: Figure
    value: float
    twin: tuple[str, dict[str, Any]]
    precision: str = "bf16"
    attention: str = "fused"

    def build_spec(self) -> dict[str, Any]:
        """Return the spec of the run, with unknown software."""
        micro_batches = self.batch // (self.layout.get("dp", 1) * self.micro_batch)
        return {
            "name": self.title.partition(", ")[0],
            "model": {"preset": self.preset},
            "layout": self.layout,
            "train": {
                "global_batch": self.batch,
                "micro_batches": micro_batches,
                "seq_len": self.seq_len,
                "precision": self.precision,
                "attention": self.attention,
                "data": "stdlib",
            },
            "resources": {"device": "cuda", "stack": "unknown"},
        }


_SP = {"sequence_parallel": True, "regather": True}
_PIPE = {"pp": 2, "tp": 2}

FAMOUS_RUNS: dict[str, FamousRun] = {
    "gpt3-175b-64": FamousRun(
        "GPT-3 175B on 64 GPUs, TP 8 x PP 8",
        "2205.05198 tables 3 and 5",
        "megatron-175b",
        "a100-80gb",
        {"tp": 8, "pp": 8, "schedule": "interleaved_1f1b", "virtual_stages": 3, "recompute": "selective", **_SP},
        *(64, 1, 2048, "step_s", 13.75, ("gpt-tiny", _PIPE)),
        attention="unfused",
    ),
    "mt-nlg-530b": FamousRun(
        "MT-NLG 530B on 2,240 GPUs, TP 8 x PP 35 x DP 8",
        "2201.11990 section 2.3: 60.1 s per step",
        "megatron-530b",
        "a100-80gb",
        {"tp": 8, "pp": 35, "dp": 8, "recompute": "full"},
        *(1920, 1, 2048, "step_s", 60.1, ("gpt-mini", _PIPE)),
        attention="unfused",
    ),
    "nemotron-4-340b": FamousRun(
        "Nemotron-4 340B on 6,144 GPUs, TP 8 x PP 12 x DP 64",
        "2406.11704 table 2; the paper does not state the chunks of the pipeline",
        "nemotron-4-340b",
        "h100",
        {"tp": 8, "pp": 12, "dp": 64, "zero": 1, "schedule": "interleaved_1f1b", "virtual_stages": 8, **_SP},
        *(2304, 1, 4096, "step_s", 8.0, ("gpt-tiny", _PIPE)),
    ),
    "deepseek-v3-2048": FamousRun(
        "DeepSeek-V3 on 2,048 H800, PP 16 x DP 128, EP 64",
        "2412.19437 table 1 and section 3.2: 180,000 GPU hours per 10^12 tokens; planned with DualPipeV",
        "deepseek-v3",
        "h800",
        {
            "pp": 16,
            "dp": 128,
            "ep": 64,
            "zero": 1,
            "schedule": "dualpipev",
            "virtual_stages": 2,
            "recompute": "selective",
        },
        # 15,360 x 4,096 tokens at 10^12 tokens per 180,000 GPU hours of 2,048 GPUs
        *(15360, 1, 4096, "step_s", 19.9, ("mixtral-tiny", {"dp": 2, "ep": 2})),
        precision="fp8",
    ),
    "glm-130b": FamousRun(
        "GLM-130B on 768 GPUs, TP 4 x PP 8 x DP 24",
        "2210.02414 section 2.3: model FLOPs utilization 32.5%; the training log of zai-org/GLM-130B states 88.5 s",
        "glm-130b",
        "a100-40gb",
        {"tp": 4, "pp": 8, "dp": 24, "zero": 1, "recompute": "full"},
        *(4224, 1, 2048, "mfu", 0.325, ("llama-tiny", _PIPE)),
        attention="unfused",
    ),
    "bloom-176b": FamousRun(
        "BLOOM 176B on 384 GPUs, TP 4 x PP 12 x DP 8",
        "2211.05100 section 3.4: 156 TFLOP/s with recompute; layout of its tr11-176B-ml.slurm",
        "bloom-176b",
        "a100-80gb",
        {"tp": 4, "pp": 12, "dp": 8, "zero": 1, "recompute": "full"},
        *(2048, 2, 2048, "hfu", 156 / 312, ("gpt-tiny", _PIPE)),
        attention="unfused",
    ),
    "gpt-neox-20b": FamousRun(
        "GPT-NeoX-20B on 96 GPUs, TP 2 x PP 4 x DP 12",
        "2204.06745 section 3: 117 TFLOP/s with recompute; layout of EleutherAI/gpt-neox configs/20B.yml",
        "gpt-neox-20b",
        "a100-40gb",
        {"tp": 2, "pp": 4, "dp": 12, "zero": 1, "recompute": "full"},
        *(1536, 4, 2048, "hfu", 117 / 312, ("gpt-tiny", _PIPE)),
        attention="unfused",
    ),
}
