"""Plans for unknown software: its assumptions, its verdict about memory, and correction by measured steps."""

from __future__ import annotations

import pytest

from planner.cost.assumptions import MAX_ASSUMPTIONS, MIN_CHANGE, list_assumptions
from planner.cost.estimate import estimate
from planner.cost.learning import REFERENCE_MARGINS, scale_to_measured
from planner.cost.memory import find_peak
from planner.cost.memory.tape import LOGITS
from planner.cost.timing import Timer
from planner.facts.parse_spec import parse_spec
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec, Layout, TrainSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stacks import STACKS
from tests.planner.hardware.reference_specs import H100, with_stack


def build_spec(layout: Layout, *, preset: str = "llama3-8b", seq_len: int = 8192, global_batch: int = 64) -> JobSpec:
    train = TrainSpec(
        global_batch=global_batch, micro_batches=global_batch // layout.dp, seq_len=seq_len, precision="bf16"
    )
    return with_stack("unknown", JobSpec(model=PRESETS[preset].model, layout=layout, train=train))


def test_assumption_has_the_step_time_of_the_opposite_setting() -> None:
    spec = build_spec(Layout(dp=8, zero=3))
    unfused = spec.model_copy(update={"train": spec.train.model_copy(update={"attention": "unfused"})})
    timer = Timer(H100)
    ratios = {one["words"]: one["ratio"] for one in list_assumptions(spec, H100)}
    assert ratios["without FlashAttention"] == pytest.approx(timer.predict(unfused).step_s / timer.predict(spec).step_s)
    assert "without FlashAttention" not in {one["words"] for one in list_assumptions(unfused, H100)}


def test_largest_assumptions_come_first() -> None:
    found = list_assumptions(build_spec(Layout(dp=2, tp=4, zero=1, sequence_parallel=True), seq_len=2048), H100)
    effects = [max(one["ratio"], 1 / one["ratio"]) for one in found]
    assert effects == sorted(effects, reverse=True)
    assert 0 < len(found) <= MAX_ASSUMPTIONS
    assert all(abs(one["ratio"] - 1) >= MIN_CHANGE for one in found)


@pytest.mark.parametrize(("stack", "cluster"), [("fsdp2", "h100"), ("ours", "h100"), ("unknown", "cpu")])
def test_known_software_and_cpus_have_no_assumptions(stack: str, cluster: str) -> None:
    spec = build_spec(Layout(dp=8))
    spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"stack": stack})})
    assert "assumptions" not in estimate(spec, CLUSTERS[cluster])["time"]


def test_unknown_software_on_a_cpu_is_planned_like_the_trainer() -> None:
    spec = build_spec(Layout(dp=2), preset="gpt-tiny", seq_len=128)
    times = {Timer(CLUSTERS["cpu"]).get_step(with_stack(stack, spec)).step_s for stack in ("unknown", "ours")}
    assert len(times) == 1


def test_peak_slightly_above_the_memory_may_fit() -> None:
    verdicts = []
    for batch in (8, 16, 512):
        spec = build_spec(Layout(dp=8, zero=3), global_batch=batch)
        one_batch = spec.model_copy(update={"train": spec.train.model_copy(update={"micro_batches": 1})})
        made = estimate(one_batch, H100)
        verdicts.append((made["fits"], made.get("may_fit", False)))
    assert verdicts == [(True, False), (False, True), (False, False)]


def test_tensor_collectives_overlap_only_with_sequence_parallelism() -> None:
    layout = Layout(dp=2, tp=4)
    spec = build_spec(layout)
    exposed = [
        Timer(H100, {"unknown": STACKS["unknown"]._replace(overlap=overlap)}).get_step(spec).exposed_s["tp"]
        for overlap in ({"tp": 0.5}, {})
    ]
    assert exposed[0] == exposed[1] > 0


def test_measured_steps_correct_a_part_of_their_own_error() -> None:
    one, two = scale_to_measured([2.0]), scale_to_measured([2.0, 2.0])
    assert 1 < one.ratio < two.ratio < 2
    assert (one.margin, two.margin, two.runs) == (*REFERENCE_MARGINS, 2)
    assert scale_to_measured([2.0, 0.5]).ratio == pytest.approx(1)


def test_loss_holds_one_fp32_copy_of_the_logits() -> None:
    """A bf16 logit has two bytes, and its fp32 copy has four. PyTorch's loss has twelve at its peak."""
    found = {}
    for stack in ("unknown", "fsdp2_eager"):
        spec = parse_spec(
            {
                "model": {"preset": "llama3-1b"},
                "train": {"global_batch": 1, "seq_len": 8192, "precision": "bf16"},
                "resources": {"device": "cuda", "stack": stack},
            }
        )
        found[stack] = find_peak(spec, 0).levels[LOGITS] / (8192 * spec.model.vocab_size)
    assert found == {"unknown": 6, "fsdp2_eager": 12}
