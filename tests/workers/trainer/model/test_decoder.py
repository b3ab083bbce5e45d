"""Decoders match the layers of torch, and their initial weights do not depend on the layout."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from planner.facts.layout import Coordinates
from planner.facts.model_shapes import Parameter, ParameterUnit, count_parameters, get_chunk_units
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec, Layout, ModelSpec, TrainSpec
from tests.support.processes import scale_timeout
from workers.checkpoint.inference import get_rope_parameters
from workers.trainer.model import Attention, Block, Decoder, Strategy, apply_rotary, init_weights
from workers.trainer.model import decoder as decoder_module
from workers.trainer.model.layers import compute_frequencies, compute_rotary
from workers.trainer.parallel.tensor_parallel import ParallelInput, TensorParallel

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48}
MODEL = ModelSpec.model_validate(
    {"arch": "llama", "vocab_size": 256, "max_seq_len": 24, "tied_embeddings": False, **SIZES}
)
ALONE = Strategy()


def started_from(num_threads: int) -> dict[str, torch.Tensor]:
    layers = range(MODEL.num_layers)
    decoder = Decoder(MODEL, layers, Strategy(), torch.float32, first=True, last=True)
    for unit in get_chunk_units(MODEL, layers, first=True, last=True):
        init_weights(decoder, unit, JobSpec(model=MODEL), Coordinates(), num_threads)
    return dict(decoder.named_parameters())


def test_initial_weights_do_not_depend_on_the_number_of_threads() -> None:
    one, many = started_from(1), started_from(8)
    assert all(torch.equal(many[name], weights) for name, weights in one.items())
    assert one["layers.0.attention.q.weight"].std() > 0


def test_draws_two_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each draw wait for the other."""
    units = get_chunk_units(MODEL, range(MODEL.num_layers), first=True, last=True)
    (two,) = (unit._replace(parameters=unit.parameters[:2]) for unit in units if unit.name == "layers.0")
    met, whole = threading.Barrier(2), decoder_module._draw_tensor

    def waits(parameter: Parameter, *more: object) -> torch.Tensor:
        met.wait(scale_timeout(5))
        return whole(parameter, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder_module, "_draw_tensor", waits)
    assert len(list(decoder_module._draw_unit(two, JobSpec(model=MODEL), 2))) == 2


def test_gpu_ranks_share_the_cores_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(16)))
    gpu = torch.device("cuda", 0)
    for ranks, num_threads in (("", 16), ("1", 16), ("8", 2), ("32", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert decoder_module.get_num_init_threads(gpu) == num_threads
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert decoder_module.get_num_init_threads(torch.device("cpu")) == 1


def spec(arch: str, **changes: object) -> ModelSpec:
    kv_heads, tied = (4, True) if arch == "gpt" else (2, False)
    sizes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": kv_heads, "ffn_hidden_size": 48}
    more = {"arch": arch, "vocab_size": 256, "max_seq_len": 24, "tied_embeddings": tied}
    return ModelSpec.model_validate({**sizes, **more, **changes})


def built(model: ModelSpec, seed: int = 1) -> tuple[Decoder, list[ParameterUnit]]:
    layers = range(model.num_layers)
    decoder = Decoder(model, layers, ALONE, torch.float32, first=True, last=True)
    units = get_chunk_units(model, layers, first=True, last=True)
    for unit in units:
        init_weights(decoder, unit, JobSpec(model=model, train=TrainSpec(seed=seed)), Coordinates())
    return decoder, units


@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_the_model_has_the_predicted_number_of_parameters(arch: str) -> None:
    model = spec(arch)
    decoder, units = built(model)
    listed = {
        (p.name if unit.name == "root" else f"{unit.name}.{p.name}"): p.shape for unit in units for p in unit.parameters
    }
    assert {name: tuple(p.shape) for name, p in decoder.named_parameters()} == listed
    assert sum(p.numel() for p in decoder.parameters()) == count_parameters(model)


@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_attention_is_causal(arch: str) -> None:
    decoder, _ = built(spec(arch))
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    before, after = decoder(tokens), decoder(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-4)


def test_a_gpt_block_matches_the_pre_norm_layer_of_torch() -> None:
    model = spec("gpt")
    block = Block(model, ALONE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    h = model.hidden_size
    other = nn.TransformerEncoderLayer(
        h, model.num_heads, model.ffn_hidden_size, 0.0, "gelu", batch_first=True, norm_first=True
    )
    attention, mlp = block.attention, block.mlp
    assert mlp is not None
    pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [
        (other.norm1.weight, block.attention_norm.weight),
        (other.norm1.bias, block.attention_norm.bias),
        (other.norm2.weight, block.mlp_norm.weight),
        (other.norm2.bias, block.mlp_norm.bias),
        (other.self_attn.in_proj_weight, torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])),
        (other.self_attn.in_proj_bias, torch.cat([attention.q.bias, attention.k.bias, attention.v.bias])),
        (other.self_attn.out_proj.weight, attention.out.weight),
        (other.self_attn.out_proj.bias, attention.out.bias),
        (other.linear1.weight, mlp.up.weight),
        (other.linear1.bias, mlp.up.bias),
        (other.linear2.weight, mlp.down.weight),
        (other.linear2.bias, mlp.down.bias),
    ]
    with torch.no_grad():
        for reference, actual in pairs:
            assert actual is not None
            reference.copy_(actual)
    x = torch.randn(2, 10, h, generator=generator)
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    torch.testing.assert_close(block(x), other(x, src_mask=mask, is_causal=True), rtol=1e-4, atol=1e-5)


def test_grouped_query_attention_equals_repeated_heads() -> None:
    grouped, whole = Attention(spec("llama"), ALONE), Attention(spec("llama", num_kv_heads=4), ALONE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in grouped.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
        whole.q.weight.copy_(grouped.q.weight)
        whole.out.weight.copy_(grouped.out.weight)
        for reference, actual in ((whole.k, grouped.k), (whole.v, grouped.v)):
            heads = actual.weight.unflatten(0, (2, 8))
            reference.weight.copy_(heads.repeat_interleave(2, 0).flatten(0, 1))
    x = torch.randn(2, 10, 32, generator=generator)
    at = compute_rotary(torch.arange(10), compute_frequencies(spec("llama"), x.device), x.dtype)
    torch.testing.assert_close(grouped(ParallelInput(x, x), at), whole(ParallelInput(x, x), at), rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_only_on_the_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 1, 12, 8) for _ in range(2))
    positions = torch.arange(12)
    at = compute_rotary(positions, 10_000.0 ** (-torch.arange(4) / 4), q.dtype)
    scores = apply_rotary(q, at)[0, 0] @ apply_rotary(k, at)[0, 0].T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert abs(float(scores[0, 0] - scores[0, 5])) > 1e-3


@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_all_layouts_start_from_the_same_weights(arch: str) -> None:
    model = spec(arch)
    whole = dict(built(model)[0].named_parameters())
    spec_of_tp2 = JobSpec(model=model, layout=Layout(tp=2), train=TrainSpec(seed=1))
    for stage, layers in enumerate((range(2), range(2, 3))):
        first, last = stage == 0, stage == 1
        units = get_chunk_units(model, layers, first=first, last=last)
        parts = []
        for index in range(2):
            strategy = Strategy(tp=TensorParallel(None, 2, index))
            decoder = Decoder(model, layers, strategy, torch.float32, first=first, last=last)
            for unit in units:
                init_weights(decoder, unit, spec_of_tp2, Coordinates(tp=index))
            parts.append(dict(decoder.named_parameters()))
        for unit in units:
            for p in unit.parameters:
                name = p.name if unit.name == "root" else f"{unit.name}.{p.name}"
                wanted = whole["embedding.weight" if name == "head.weight" and arch == "gpt" else name]
                pair = [part[name] for part in parts]
                joined = pair[0] if p.tp_dim is None else torch.cat(pair, p.tp_dim)
                assert torch.equal(joined, wanted), name
    assert not torch.equal(
        whole["embedding.weight"], dict(built(model, seed=2)[0].named_parameters())["embedding.weight"]
    )


@pytest.mark.parametrize("preset", ["llama2-7b", "llama3-8b", "llama3-1b", "llama3-405b", "mixtral-8x7b"])
def test_rotary_frequencies_match_the_published_model(preset: str) -> None:
    model = PRESETS[preset].model
    from transformers import LlamaConfig  # seconds, which all that collect would take
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        max_position_embeddings=model.max_seq_len,
        rope_parameters=get_rope_parameters(model),
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(compute_frequencies(model, torch.device("cpu")), expected, rtol=1e-5, atol=0)


def test_rotary_backward_rotates_back() -> None:
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    positions, each = torch.arange(5), torch.rand(4)
    angle = torch.outer(positions.float(), each)
    a, b = x.chunk(2, -1)
    plain = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    grad = torch.randn_like(plain)
    (expected,) = torch.autograd.grad(plain, x, grad)
    turned = apply_rotary(x, compute_rotary(positions, each, x.dtype))
    torch.testing.assert_close(turned, plain)
    torch.testing.assert_close(torch.autograd.grad(turned, x, grad)[0], expected)
