"""Steps of the trainer against a second implementation of the same mathematics, which shares no code with it.

The verification of a run compares several ranks with one rank of the same trainer. A fault in a formula that both
use, such as rotary angles, AdamW, the schedule, or the number of tokens, shows only here.
"""

from __future__ import annotations

import cmath
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from tests.parity.cases import SIZES, VARIANTS, write_data
from tests.parity.rank import make_trainer
from workers.meter import Recorder

STEPS = 4
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}
Weights = dict[str, torch.Tensor]


def build_spec(arch: str, variant: str = "", **train: Any) -> JobSpec:
    model = SIZES[arch] | VARIANTS[variant]
    model |= {"rope_scaling": LLAMA3_SCALING, "rope_base": 500.0} if arch == "llama" else {}
    settings = {
        "global_batch": 6,
        "micro_batches": 3,
        "seq_len": 32,
        "steps": STEPS,
        "warmup_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.3,
        "grad_clip": 0.5,
        "data": "parity.bin",
    }
    return parse_spec({"model": model, "train": settings | train})


def rotate(x: torch.Tensor, spec: JobSpec) -> torch.Tensor:
    """Multiply each pair of features by a unit complex number. x: (batch, seq, heads, size)."""
    model, half = spec.model, x.shape[-1] // 2
    angles = torch.zeros(x.shape[1], half, dtype=torch.complex128)
    for pair in range(half):
        frequency = 1 / model.rope_base ** (2 * pair / (2 * half))
        if model.rope_scaling:  # the published code of Llama 3.1, by wavelength
            scaling, wavelength = model.rope_scaling, 2 * math.pi / frequency
            shortest = scaling.original_max_seq_len / scaling.high_freq_factor
            longest = scaling.original_max_seq_len / scaling.low_freq_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength > shortest:
                share = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - share) * frequency / scaling.factor + share * frequency
        for position in range(x.shape[1]):
            angles[position, pair] = cmath.exp(1j * position * frequency)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * angles[None, :, None]
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def attend(x: torch.Tensor, w: Weights, prefix: str, spec: JobSpec, tokens: torch.Tensor) -> torch.Tensor:
    model, (batch, seq, _) = spec.model, x.shape

    def project(name: str, heads: int) -> torch.Tensor:
        bias = w.get(f"{prefix}.{name}.bias")
        return functional.linear(x, w[f"{prefix}.{name}.weight"], bias).view(batch, seq, heads, model.head_size)

    q, k, v = project("q", model.num_heads), project("k", model.num_kv_heads), project("v", model.num_kv_heads)
    if model.arch == "llama":
        q, k = rotate(q, spec), rotate(k, spec)
    hidden = torch.full((batch, seq, seq), -math.inf, dtype=x.dtype)
    for row in range(batch):
        for at in range(seq):
            first = at
            while first > 0 and (spec.train.document_end is None or tokens[row, first - 1] != spec.train.document_end):
                first -= 1
            hidden[row, at, first : at + 1] = 0.0
    group = model.num_heads // model.num_kv_heads
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(model.head_size) + hidden[:, None]
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return functional.linear(out.flatten(2), w[f"{prefix}.out.weight"], w.get(f"{prefix}.out.bias"))


def normalize(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    if f"{name}.bias" in w:
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def apply_swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gated = functional.linear(x, gate)
    return functional.linear(gated / (1 + (-gated).exp()) * functional.linear(x, up), down)


def mix_experts(x: torch.Tensor, w: Weights, prefix: str, spec: JobSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (batch, seq, hidden), and the load-balancing loss (2412.19437, equations 17 to 20).

    Each expert takes the first tokens of a sequence up to its capacity (GShard, 2006.16668, algorithm 1).
    """
    moe, (batch, seq, _) = spec.model.moe, x.shape
    assert moe is not None
    experts, k = moe.num_experts, moe.experts_per_token
    capacity = seq if moe.capacity_factor is None else math.ceil(moe.capacity_factor * k * seq / experts)
    probabilities = functional.linear(x, w[f"{prefix}.router.weight"]).softmax(-1)
    ranked = probabilities.detach().argsort(-1, descending=True)
    chosen, taken = torch.zeros_like(probabilities), torch.zeros_like(probabilities)
    for row in range(batch):
        tokens_of_expert = [0] * experts
        for position in range(seq):
            for expert in ranked[row, position, :k].tolist():
                chosen[row, position, expert] = 1
                taken[row, position, expert] = tokens_of_expert[expert] < capacity
                tokens_of_expert[expert] += 1
    gates = probabilities * chosen
    gates = gates / gates.sum(-1, keepdim=True) * taken
    parts = [w[f"{prefix}.experts.{name}.weight"] for name in ("gate", "up", "down")]
    out = torch.stack([gates[..., e : e + 1] * apply_swiglu(x, *(part[e] for part in parts)) for e in range(experts)])
    whole = out.sum(0)
    if moe.shared_experts:
        whole = whole + apply_swiglu(x, *(w[f"{prefix}.shared.{name}.weight"] for name in ("gate", "up", "down")))
    share = chosen.sum(1) * experts / (k * seq)
    return whole, (share * probabilities.mean(1)).sum() * moe.balance_loss / batch


def compute_loss(
    w: Weights, spec: JobSpec, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy, and the sum of the load-balancing losses."""
    x = w["embedding.weight"][tokens]
    balance = x.new_zeros(())
    if spec.model.arch == "gpt":
        x = x + w["positions.weight"][: tokens.shape[1]]
    for layer in range(spec.model.num_layers):
        name = f"layers.{layer}"
        x = x + attend(normalize(x, w, f"{name}.attention_norm"), w, f"{name}.attention", spec, tokens)
        h = normalize(x, w, f"{name}.mlp_norm")
        if f"{name}.moe.router.weight" in w:
            out, loss = mix_experts(h, w, f"{name}.moe", spec)
            x, balance = x + out, balance + loss
        elif spec.model.arch == "llama":
            x = x + apply_swiglu(h, *(w[f"{name}.mlp.{part}.weight"] for part in ("gate", "up", "down")))
        else:
            up = functional.linear(h, w[f"{name}.mlp.up.weight"], w[f"{name}.mlp.up.bias"])
            inner = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
            x = x + functional.linear(inner, w[f"{name}.mlp.down.weight"], w[f"{name}.mlp.down.bias"])
    logits = normalize(x, w, "final_norm") @ w.get("head.weight", w["embedding.weight"]).T
    chosen = logits.gather(-1, targets[..., None])[..., 0]
    return (logits.logsumexp(-1) - chosen).sum() / targets.numel(), balance


class AdamW:
    """AdamW (1711.05101 algorithm 2) with warm-up, cosine decay to a tenth, and clipping by the global norm."""

    def __init__(self, spec: JobSpec, weights: Weights) -> None:
        self.train, self.weights, self.count = spec.train, weights, 0
        self.first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self, gradients: Weights) -> float:
        train, index = self.train, self.count
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients.values()))
        if train.grad_clip and norm > train.grad_clip:
            gradients = {name: g * (train.grad_clip / norm) for name, g in gradients.items()}
        if index < train.warmup_steps:
            rate = train.learning_rate * (index + 1) / train.warmup_steps
        else:
            done = (index - train.warmup_steps) / (train.steps - train.warmup_steps)
            rate = train.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        self.count += 1
        for name, weight in self.weights.items():
            gradient, decay = gradients[name], train.weight_decay if weight.ndim > 1 else 0.0
            self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
            self.second[name] = 0.95 * self.second[name] + 0.05 * gradient**2
            first = self.first[name] / (1 - 0.9**self.count)
            second = self.second[name] / (1 - 0.95**self.count)
            self.weights[name] = weight - rate * (decay * weight + first / (second.sqrt() + 1e-8))
        return norm


@pytest.mark.parametrize(
    ("arch", "variant", "train"),
    [
        ("llama", "", {}),
        ("llama", "", {"document_end": 32}),
        ("gpt", "", {}),
        ("gpt", "", {"document_end": 32}),
        ("moe", "", {}),
        ("moe", "capacity", {}),
        ("moe", "mixed layers", {}),
    ],
)
def test_steps_match_a_second_implementation(arch: str, variant: str, train: dict[str, Any], tmp_path: Path) -> None:
    write_data(tmp_path)
    spec = build_spec(arch, variant, **train)
    trainer = make_trainer(spec, tmp_path, Recorder(0))
    weights = {p.name: p.master.detach().clone().double() for p in trainer.model.parameters}
    own = AdamW(spec, dict(weights))
    for index in range(STEPS):
        result = trainer.train_step(index)
        assert trainer.batch is not None
        batch = torch.from_numpy(trainer.batch.astype("int64"))
        tokens, targets = batch[:, :-1], batch[:, 1:]
        held = {name: w.detach().requires_grad_() for name, w in own.weights.items()}
        loss, balance = compute_loss(held, spec, tokens, targets)
        gradients = dict(zip(held, torch.autograd.grad(loss + balance, list(held.values())), strict=True))
        norm = own.step(gradients)
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for p in trainer.model.parameters:
        actual, expected = p.master.detach().double(), own.weights[p.name].detach()
        update = (expected - weights[p.name]).norm()
        # The bias of keys has no gradient except rounding, because softmax ignores a shift of all scores.
        assert (actual - expected).norm() < max(1e-3 * update, 2e-5), p.name
