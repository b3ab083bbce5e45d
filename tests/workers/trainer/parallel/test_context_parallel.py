"""Attention stays within documents, and saves no scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.facts.parse_spec import parse_fields, parse_spec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError
from tests.memory.compare import compare_stages
from tests.parity.cases import SIZES
from workers.dry_run import run_dry_step
from workers.torch_private.kernels import attend
from workers.trainer.model import Decoder, Strategy
from workers.trainer.parallel.context_parallel import TokenPositions, attend_in_documents, get_document_ids

END = 2
TOKENS = torch.tensor([[7, 8, END, 9, 10, 11, 12, END, END, 5, 6, 7], [5, END, 6, 7, 8, 9, 5, 6, 7, 8, 9, END]])
ENDS = [[3, 8, 9, 12], [2, 12]]


def test_the_end_token_belongs_to_its_document() -> None:
    assert get_document_ids(TOKENS, None) is None
    numbered = get_document_ids(TOKENS, END)
    assert numbered is not None
    assert numbered.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3], [0, 0] + [1] * 10]


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(recompute="full"),
        Strategy(attention="unfused"),
        Strategy(attention="unfused", recompute="selective"),
    ],
    ids=lambda strategy: f"{strategy.attention} {strategy.recompute}",
)
def test_a_packed_document_equals_a_separate_sequence(strategy: Strategy) -> None:
    """Rotary scores depend only on distances, so a separate document may begin at position 0."""
    torch.manual_seed(0)
    model = parse_fields({"model": SIZES["llama"]}).model
    decoder = Decoder(model, range(model.num_layers), strategy, torch.float32, first=True, last=True)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    decoder(TOKENS, get_document_ids(TOKENS, END)).square().sum().backward()
    packed = [parameter.grad for parameter in decoder.parameters()]
    decoder.zero_grad(set_to_none=True)
    for row, ends in zip(TOKENS, ENDS, strict=True):
        for start, end in zip([0, *ends], ends, strict=False):
            decoder(row[None, start:end]).square().sum().backward()
    for parameter, gradient in zip(decoder.parameters(), packed, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_block_of_hidden_keys_has_no_weight() -> None:
    """A context-parallel rank merges blocks by their log-sum-exps. The value of a fully hidden block must be tiny."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    positions = torch.arange(12)
    queries = TokenPositions(torch.tensor([[0, 0, 1, 1, 1, 1]]), positions[6:])
    keys = TokenPositions(torch.tensor([[0, 0, 0, 0, 0, 0]]), positions[:6])
    out, lse = attend_in_documents(q, k, v, queries, keys)
    seen, seen_lse = attend(q[..., :2, :], k, v, causal=False)
    torch.testing.assert_close((out[..., :2, :], lse[..., :2]), (seen, seen_lse))
    assert out.isfinite().all()
    assert (lse[..., 2:] < -1e29).all()


def test_rejects_an_end_token_outside_the_vocabulary_and_compiled_blocks() -> None:
    fields = {"model": SIZES["llama"], "train": {"seq_len": 32, "document_end": 256}}
    with pytest.raises(SpecError, match=r"`train\.document_end` is 256, but vocab_size is 256\. Use at most 255\."):
        parse_spec(fields)
    compiled = {"seq_len": 32, "document_end": 255, "compile": True}
    (problem,) = find_unsupported_fields(parse_spec({**fields, "train": compiled}))
    assert problem.field == "train.compile"
    assert "within documents" in problem.message


@pytest.mark.parametrize(
    ("layout", "train"),
    [({"cp": 2}, {"precision": "bf16"}), ({}, {}), ({}, {"attention": "unfused", "precision": "bf16"})],
    ids=["ring", "alone", "unfused"],
)
def test_the_plan_includes_the_document_mask(layout: dict[str, int], train: dict[str, str]) -> None:
    model = {**SIZES["llama"], "num_layers": 1, "max_seq_len": 4096}
    settings = {"global_batch": 2, "micro_batches": 2, "seq_len": 4096, "document_end": 3}
    (row,) = compare_stages(parse_fields({"model": model, "layout": layout, "train": {**settings, **train}}))
    assert abs(row.error) < 0.025, row


def peak_bytes(seq_len: int, **layout: Any) -> int:
    model = {"preset": "llama-tiny", "max_seq_len": 2**17}
    train = {"global_batch": 1, "seq_len": seq_len}
    return run_dry_step(parse_fields({"model": model, "layout": {"cp": 4, **layout}, "train": train}), 1).peak_bytes


@pytest.mark.parametrize(("method", "recompute"), [("ring", "full"), ("all_gather", "none")])
def test_twice_the_sequence_adds_as_much_again(method: str, recompute: str) -> None:
    short, long, longer = (peak_bytes(n * 2**14, cp_method=method, recompute=recompute) for n in (1, 2, 3))
    assert longer - long == pytest.approx(long - short, rel=0.01)
