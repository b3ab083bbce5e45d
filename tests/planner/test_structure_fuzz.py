"""Input of wrong structure: specs, configs of models and tools, accelerators. Each gives a result or a clear error."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
import yaml

from planner.cost.estimate import estimate, find_size_problems, get_default_cluster
from planner.cost.measured_steps import add_measured_steps, split_measured_steps
from planner.facts.hugging_face import parse_config, read_config
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.presets import TEMPLATES
from planner.facts.spec_rules import find_problems, find_unsupported_fields
from planner.facts.tool_layouts.recognition import read_layout
from planner.facts.validation import SpecError
from planner.hardware.own_accelerator import parse_own_cluster
from tests.planner.facts.test_hugging_face import CONFIGS, LLAMA
from tests.planner.facts.tool_layouts.cases import CASES
from tests.planner.wrong_specs import GOOD
from tests.support.structures import change_structure

MAX_CPU_S = 10  # of one input
MAX_MESSAGE_CHARS = 3000
MEMORY = {"lora_rank": 8, "lora_targets": "attention", "frozen_weights": "nf4", "optimizer_in_backward": False}
OWN = [
    "memory_gb=80",
    "bf16_tflops=989",
    "memory_gb_s=3350",
    "node_gb_s=450",
    "network_gb_s=50",
    "gpus_per_node=8",
    "name=a",
]
TOKENS = [
    *("null", "[]", "{}", "-1", "0", "1e400", "nan", "9" * 26, "1" * 5000, '""', "'x'", "true", "[1, 2]", "{a: 1}"),
    *("!!binary aGk=", "!!python/object:os.system x", "&a [*a]", "*a", "0x10", "1_000", "2026-01-01", "~", "\ud7ff"),
    *("\0", "${X}", "$X", "|", "x" * 2000, "<<: *x", ".inf", "1e308", "1e-300", "3", "1e6", '"\\ud800"'),
]


def build_specs() -> list[Any]:
    full = parse_fields({**GOOD, "layout": {"dp": 2, "tp": 2, "pp": 2, "zero": 1}}).model_dump()
    templates = [each for template in TEMPLATES.values() for each in (template.spec, template.twin) if each]
    step = {"layout": {"dp": 2}, "step_s": 1.0, "micro_batches": 2}
    return [{**json.loads(json.dumps(spec)), "measured_steps": [step]} for spec in [GOOD, full, *templates]] + [
        {**GOOD, "layout": {}, "memory": MEMORY, "resources": {"stack": "fsdp2"}}
    ]


def draw_spec(draw: Random) -> Any:
    return change_structure(draw, draw.choice(SPECS))


def plan(data: Any) -> Any:
    fields, steps = split_measured_steps(data)
    spec = parse_fields(fields)
    if problems := find_problems(spec) or find_size_problems(spec):
        raise SpecError(problems)
    return estimate(spec, add_measured_steps(get_default_cluster(spec), spec, steps)), find_unsupported_fields(spec)


def draw_config(draw: Random) -> Any:
    config = CONFIGS[draw.choice(NAMES)]
    return change_structure(draw, {"text_config": config, "model_type": "x"} if draw.random() < 0.2 else config)


def read_model(config: Any) -> Any:
    found = read_config(config)
    assert parse_config(json.dumps(config)).model == found.model
    return found.model.model_dump(), count_parameters(found.model), found.notes


def draw_tool_text(draw: Random) -> tuple[str, int | None]:
    case = draw.choice(CASES)
    text = case.text
    for _ in range(draw.choice((1, 1, 2, 3))):
        lines, kind = text.split("\n"), draw.random()
        if kind < 0.7 and (values := list(re.finditer(r"(?<=[=:\s])\s*[\w.\"'\[\]{}-]+", text))):
            value = draw.choice(values)
            text = f"{text[: value.start()]} {draw.choice(TOKENS)}{text[value.end() :]}"
        elif kind < 0.8:
            draw.shuffle(lines)
            text = "\n".join(lines)
        elif kind < 0.9:
            text = "\n".join([*lines, *draw.choices(lines, k=2)])
        else:
            text = text[: draw.randrange(len(text) + 1)]
    return text, draw.choice((case.ranks, 1, 8, 65536, None))


def draw_tool_document(draw: Random) -> tuple[str, int | None]:
    case, document = draw.choice(DOCUMENTS)
    return json.dumps(change_structure(draw, document)), draw.choice((case, 1, 8, None))


def parse_tool_document(text: str) -> Any:
    for parse in (json.loads, tomllib.loads, yaml.safe_load):
        try:
            found = parse(text)
        except (ValueError, yaml.YAMLError):
            continue
        return json.loads(json.dumps(found, default=str)) if isinstance(found, dict) else None
    return None


def read_tool_layout(drawn: tuple[str, int | None]) -> Any:
    found = read_layout(*drawn)
    parse_fields({"model": {"preset": "llama3-8b"}, **found.spec})
    return found


def draw_accelerator(draw: Random) -> str:
    parts = list(OWN)
    for _ in range(draw.choice((1, 2))):
        place = draw.randrange(len(parts))
        name = parts[place].partition("=")[0]
        parts[place] = draw.choice([*(f"{name}={token}" for token in TOKENS), name, "", f"{name}==1", f"{name}=1"])
    return "own:" + ",".join(parts)


def plan_on_accelerator(text: str) -> Any:
    return estimate(parse_fields({**GOOD, "resources": {"device": "cuda"}}), parse_own_cluster(text))


SPECS, NAMES = build_specs(), sorted(CONFIGS)
DOCUMENTS = [(case.ranks, found) for case in CASES if (found := parse_tool_document(case.text)) is not None]


class Importer(NamedTuple):
    draw: Callable[[Random], Any]
    read: Callable[[Any], Any]
    count: int  # of cases in the default tier


IMPORTERS = {
    "spec": Importer(draw_spec, plan, 60),
    "Hugging Face": Importer(draw_config, read_model, 300),
    "text of a tool": Importer(draw_tool_text, read_tool_layout, 300),
    "document of a tool": Importer(draw_tool_document, read_tool_layout, 150),
    "own accelerator": Importer(draw_accelerator, plan_on_accelerator, 100),
}


def check_importer(importer: Importer, draw: Random) -> bool:
    """Draw one input. Return True if it was read, and False if it was refused with a message that REST can send."""
    drawn, began = importer.draw(draw), time.process_time()
    try:
        result = importer.read(drawn)
        json.dumps(result, allow_nan=False, ensure_ascii=False, default=str).encode()
    except SpecError as error:
        for problem in error.problems:
            assert 0 < len(problem.message) < MAX_MESSAGE_CHARS, problem
            problem.message.encode()
        return False
    finally:
        assert time.process_time() - began < MAX_CPU_S, drawn
    return True


@pytest.mark.parametrize("name", IMPORTERS)
def test_any_structure_is_read_or_refused(name: str) -> None:
    draw = Random(53)
    read = [check_importer(IMPORTERS[name], draw) for _ in range(IMPORTERS[name].count)]
    assert 0 < sum(read) < len(read)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", IMPORTERS)
def test_many_structures_are_read_or_refused(name: str, seed: int) -> None:
    draw = Random(seed)
    for _ in range(10 * IMPORTERS[name].count):
        check_importer(IMPORTERS[name], draw)


@pytest.mark.parametrize("value", ["$X", "x", "nan", "1" * 5000, "-1", "2"])
def test_dropout_that_is_no_probability_is_refused(value: str) -> None:
    with pytest.raises(SpecError, match=r"`--hidden-dropout` is .* Use a number from 0 to 1"):
        read_layout(f"--tensor-model-parallel-size 1 --micro-batch-size 1 --hidden-dropout {value}", 8)


@pytest.mark.parametrize("value", ["$X", "x", "-5", "1e13"])
def test_rope_base_that_is_no_number_costs_the_model(value: str) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --vocab-size 256 --swiglu"
    rope = f"--position-embedding-type rope --rotary-base {value}"
    found = read_layout(f"--tensor-model-parallel-size 1 --micro-batch-size 1 {sizes} {rope}", 8)
    assert "model" not in found.spec
    assert any("`--rotary-base` is" in note for note in found.notes)


def test_text_that_is_no_unicode_is_refused() -> None:
    for read in (lambda: read_config({**LLAMA, "\ud800": 1}), lambda: read_layout('{"tp": "\\ud800"}', 8)):
        with pytest.raises(SpecError, match=r"contains?.*'\\ud800'. Use valid Unicode text"):
            read()
