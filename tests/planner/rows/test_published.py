"""Published values that the planner reproduces."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from planner.cost.memory import get_layer_bytes, get_memory
from planner.cost.pipeline_simulation import count_chunks_in_flight
from planner.cost.timing import Timer
from planner.facts.model_shapes import compute_model_flops, count_active_parameters, count_parameters
from planner.facts.precision import get_mixed_precision
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stacks import compute_hardware_flops
from tests.planner.rows.published import Row, gpt, korthikanti_table_5, megatron_run, megatron_table_1

GIB = 2**30
Spec = dict[str, Any]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3-1b", 1_235_814_400),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameter_counts_equal_published_counts(preset: str, expected: int) -> None:
    assert count_parameters(PRESETS[preset].model) == expected


def test_active_parameters_count_only_the_experts_of_a_token() -> None:
    assert count_active_parameters(PRESETS["mixtral-8x7b"].model) == 12_879_925_248
    assert round(count_active_parameters(PRESETS["deepseek-v3"].model) / 1e9, 1) == 37.6
    assert count_active_parameters(PRESETS["gpt2"].model) == count_parameters(PRESETS["gpt2"].model)


# 2104.04473 table 1, billions
@pytest.mark.parametrize(
    ("preset", "printed"),
    [
        ("1.7b", "1.7"),
        ("3.6b", "3.6"),
        ("7.5b", "7.5"),
        ("18b", "18.4"),
        ("39b", "39.1"),
        ("76b", "76.1"),
        ("145b", "145.6"),
        ("310b", "310.1"),
        ("530b", "529.6"),
        ("1t", "1008.0"),
    ],
)
def test_megatron_parameters_match_the_printed_digits(preset: str, printed: str) -> None:
    assert f"{count_parameters(PRESETS[f'megatron-{preset}'].model) / 1e9:.1f}" == printed


def test_gpt3_parameters_match_its_shapes() -> None:
    assert count_parameters(PRESETS["gpt3-175b"].model) == 174_604_259_328


# 1910.02054 table 1: ranks, parameters in billions, GB of stages 1, 2, 3 as printed
@pytest.mark.parametrize(
    ("ranks", "billions", "printed"),
    [
        (1, 7.5, ("120", "120", "120")),
        (1, 128, ("2048", "2048", "2048")),
        (1, 1000, ("16000", "16000", "16000")),
        (4, 7.5, ("52.5", "41.3", "30")),
        (4, 128, ("896", "704", "512")),
        (4, 1000, ("7000", "5500", "4000")),
        (64, 7.5, ("31.4", "16.6", "1.88")),
        (64, 128, ("536", "284", "32")),
        (64, 1000, ("4187", "2218", "250")),
        (1024, 7.5, ("30.1", "15.1", "0.12")),
    ],
)
def test_zero_table_1_matches_the_printed_digits(ranks: int, billions: float, printed: tuple[str, ...]) -> None:
    for zero, text in enumerate(printed, start=1):
        mix = get_mixed_precision("bf16_gradients")
        divided = {1: mix.optimizer_bytes, 2: mix.optimizer_bytes + mix.gradient_bytes, 3: mix.state_bytes}[zero]
        gigabytes = billions * (mix.state_bytes - divided + divided / ranks)
        digits = len(text.partition(".")[2])
        # The paper rounds 41.25 up and cuts 4187.5 and 2218.75: allow either neighbour of the last digit.
        assert abs(gigabytes - float(text)) <= 0.76 * 10**-digits


# 2205.05198 figure 1: layers, hidden, heads, pp, chunks, micro-batch; GiB with tp alone, and with SP and selective
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "chunks", "micro_batch", "tp_alone", "both"),
    [(48, 6144, 64, 1, 1, 4, 59.25, 9.5625), (105, 20480, 128, 35, 3, 1, 114.02, 23.08)],
)
def test_activations_match_korthikanti_figure_1(
    layers: int, hidden: int, heads: int, pp: int, chunks: int, micro_batch: int, tp_alone: float, both: float
) -> None:
    def gib(*, sequence_parallel: bool) -> float:
        spec = megatron_run(
            gpt(layers, hidden, heads),
            tp=8,
            pp=pp,
            chunks=chunks,
            micro_batch=micro_batch,
            gpus=8 * pp,
            batch=pp * 8 * micro_batch,
            recompute="selective" if sequence_parallel else "none",
            sequence_parallel=sequence_parallel,
        )
        in_flight = count_chunks_in_flight(spec.layout, 0, spec.train.micro_batches)
        return layers / pp / chunks * in_flight * get_layer_bytes(spec) / GIB

    assert gib(sequence_parallel=False) == pytest.approx(tp_alone, rel=1e-3)
    assert gib(sequence_parallel=True) == pytest.approx(both, rel=1e-3)


def errors(rows: list[Row]) -> list[float]:
    timer = Timer(CLUSTERS["a100-80gb"])
    return [abs(timer.get_step(row.spec).step_s / row.seconds - 1) for row in rows]


def test_iteration_times_match_megatron_table_1() -> None:
    off = errors(megatron_table_1())
    assert mean(off) < 0.05
    assert max(off) < 0.10


def test_iteration_times_match_korthikanti_table_5() -> None:
    off = errors(korthikanti_table_5())
    assert mean(off) < 0.05
    assert max(off) < 0.10


def test_flops_match_megatron_equation_3() -> None:
    for row in megatron_table_1():
        spec = row.spec
        h, layers, v, s = spec.model.hidden_size, spec.model.num_layers, spec.model.vocab_size, spec.train.seq_len
        full = 96 * spec.train.global_batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        assert compute_hardware_flops(spec) == pytest.approx(full, rel=1e-12)


def test_mfu_excludes_recompute() -> None:
    """The published 52% of the 1T run is HFU. Its MFU is about 39%."""
    row = megatron_table_1()[-1]
    peak = 312e12 * row.spec.layout.world_size * row.seconds
    assert compute_hardware_flops(row.spec) / peak == pytest.approx(0.522, abs=0.001)
    assert compute_model_flops(row.spec) / peak == pytest.approx(0.392, abs=0.002)


def test_selective_recompute_repeats_only_the_scores() -> None:
    """In 2205.05198 equations 7 and 8, attention's forward adds 4 b s^2 h per layer to the model FLOPs."""
    spec: JobSpec = korthikanti_table_5()[1].spec
    h, layers, v, s = spec.model.hidden_size, spec.model.num_layers, spec.model.vocab_size, spec.train.seq_len
    once = 72 * spec.train.global_batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    again = 4 * spec.train.global_batch * s**2 * layers * h
    assert compute_model_flops(spec) == pytest.approx(once, rel=1e-12)
    assert compute_hardware_flops(spec) == pytest.approx(once + again, rel=1e-12)


def _own_test(layout: Spec, train: Spec) -> JobSpec:
    """Return a model of Megatron-LM's functional tests."""
    model = {
        "arch": "gpt",
        "num_layers": 12,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "ffn_hidden_size": 2048,
    }
    return JobSpec.model_validate(
        {
            "model": {**model, "vocab_size": 50304, "max_seq_len": 1024, "tied_embeddings": True},
            "layout": layout,
            "train": {**train, "global_batch": 32, "seq_len": 1024, "precision": "bf16", "dropout": True},
            "resources": {"device": "cuda", "stack": "megatron"},
        }
    )


@pytest.mark.parametrize(
    ("layout", "train", "published"),
    [
        ({"dp": 8, "zero": 1}, {"micro_batches": 1, "attention": "unfused"}, 4_702_430_720),
        ({"dp": 8, "zero": 1}, {"micro_batches": 1}, 2_690_742_784),
        ({"dp": 8, "recompute": "full"}, {"micro_batches": 1}, 2_561_334_272),
        ({"dp": 2, "pp": 4}, {"micro_batches": 4}, 2_210_900_992),
        (
            {"dp": 2, "pp": 4, "virtual_stages": 3, "schedule": "interleaved_1f1b"},
            {"micro_batches": 4, "attention": "unfused"},
            4_161_191_424,
        ),
        ({"pp": 2, "tp": 2, "cp": 2, "sequence_parallel": True}, {"micro_batches": 8}, 935_253_504),
        ({"dp": 2, "tp": 4, "zero": 1}, {"micro_batches": 4}, 1_043_513_856),
    ],
)
def test_peak_memory_matches_megatron_tests(layout: Spec, train: Spec, published: int) -> None:
    """Compare with torch.cuda.max_memory_allocated of the last rank. The test adds a whole fp32 table."""
    spec = _own_test(layout, train)
    kept = sum(get_memory(spec, spec.layout.pp - 1).values())
    assert kept + 50304 * 512 * 4 == pytest.approx(published, rel=0.025)


@pytest.mark.parametrize(
    ("layout", "published"),
    [
        ({"dp": 8, "zero": 1}, 581_489_664),
        ({"dp": 2, "pp": 4, "virtual_stages": 3, "schedule": "interleaved_1f1b"}, 759_682_560),
    ],
)
def test_steady_memory_matches_megatron_tests(layout: Spec, published: int) -> None:
    """Compare with torch.cuda.memory_allocated of the last rank after a step.

    The rank holds three workspaces of 32 MiB, its state, and each chunk's last input with its gradient.
    """
    parts = get_memory(_own_test(layout, {"micro_batches": 4 if "pp" in layout else 1}), layout.get("pp", 1) - 1)
    held = sum(parts[name] for name in ("parameters", "gradients", "optimizer", "buffers"))
    assert held + 3 * 32 * 2**20 == pytest.approx(published, rel=1e-4)
