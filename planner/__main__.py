"""The planner on the command line: python -m planner estimate | search | auto | explain."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner.cost.estimate import Estimate, estimate, get_default_cluster, get_rank_memory, parse_plannable
from planner.cost.measured_steps import FLAG, FLAG_EXAMPLE, add_measured_steps, parse_flag, parse_measured_steps
from planner.explain import explain
from planner.facts.hugging_face import parse_config
from planner.facts.kinds import reset_dry_ranks
from planner.facts.memory_options import MemoryOptions
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import parse_fields
from planner.facts.presets import PRESETS, TEMPLATES
from planner.facts.resources import SoftwareSpec
from planner.facts.spec import JobSpec, Layout, ModelSpec, TrainSpec
from planner.facts.tool_layouts.recognition import read_layout
from planner.facts.validation import Problem, SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import Cluster
from planner.hardware.own_accelerator import OwnAccelerator, build_own_cluster, parse_own_cluster
from planner.hardware.stacks import STACKS
from planner.report import format_auto, format_estimate, format_explanations, format_search
from planner.search.auto_layout import Capacity, HostCapacity, find_fastest_layout, parse_auto_spec, parse_draft
from planner.search.layout_search import Constraints, check_constraints, search
from planner.search.neighbors import find_allowed_neighbors, suggest_layouts

LAYOUT_FLAGS = tuple(name for name in Layout.model_fields)
TRAIN_FLAGS = ("global_batch", "micro_batches", "seq_len", "precision", "attention")
SOFTWARE_FLAGS = tuple(SoftwareSpec.model_fields)
MEMORY_FLAGS = tuple(MemoryOptions.model_fields)
CHOSEN = (*LAYOUT_FLAGS, "micro_batches")  # chosen by search and auto


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return 0, or 2 for an invalid spec."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except SpecError as error:
        for problem in error.problems:
            print(problem.sentence, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m planner", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, words in (
        ("estimate", _estimate, "predict memory, traffic, and step time of one layout"),
        ("search", _search, "compare all layouts for a number of ranks and list the fastest"),
        (
            "auto",
            _auto,
            "choose the fastest layout that fits; a layout flag accepts one value or a list such as 1,3",
        ),
        ("explain", _explain, "show the formula and source of each term of the estimate"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.set_defaults(run=run)
        plans_one_layout = name in ("estimate", "explain")
        _add_spec(command, plans_one_layout=plans_one_layout)
        if plans_one_layout:
            tools = "torchtitan, Megatron-LM, NeMo, DeepSpeed, GPT-NeoX, accelerate, Lightning, or nanotron"
            words = f"config file of {tools}"
            command.add_argument("--layout", type=Path, metavar="FILE", help=f"{words}; use - for standard input")
            command.add_argument(
                "--ranks", type=int, help="number of ranks of --layout (default: the number in the file)"
            )
        command.add_argument("--json", action="store_true", help="JSON instead of text")
        if name == "auto":
            command.add_argument(
                "--ranks", type=int, help="number of ranks (default: the number that gives the fastest step)"
            )
            command.add_argument(
                "--max-ranks", type=int, help="maximum number of ranks (default: one node of the cluster)"
            )
        if name == "search":
            command.add_argument("--ranks", type=int, required=True, help="number of ranks")
        if name in ("search", "auto"):
            command.add_argument(
                "--max-micro-batch", type=int, default=16, help="largest micro-batch in sequences (default 16)"
            )
            command.add_argument(
                "--max-memory-gib", type=_gib, help="memory limit per rank in GiB (default: the device memory)"
            )
        if name == "search":
            command.add_argument("--limit", type=int, default=10, help="layouts to print (default 10)")
        if name == "explain":
            command.add_argument(
                "--stage", type=int, help="pipeline stage to explain (default: the stage with the most memory)"
            )
    return parser


def _gib(text: str) -> float:
    """Parse a size in GiB.

    Raises:
        argparse.ArgumentTypeError: If the text is not a valid size.
    """
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 2**-30 <= size <= 2**30:
        raise argparse.ArgumentTypeError(f"the value is {text!r}. Use a number of GiB above 0 and at most {2**30:,}")
    return size


def _add_spec(command: argparse.ArgumentParser, *, plans_one_layout: bool) -> None:
    source = command.add_mutually_exclusive_group(required=not plans_one_layout)
    source.add_argument(
        "--model", choices=sorted(PRESETS), metavar="PRESET", help="model preset: " + ", ".join(PRESETS)
    )
    source.add_argument(
        "--spec", type=Path, metavar="FILE", help="JSON file with the job spec; use - for standard input"
    )
    source.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json of a Hugging Face model; use - for standard input"
    )
    source.add_argument("--template", choices=sorted(TEMPLATES), help="published layout")
    command.add_argument(
        "--cluster",
        choices=sorted(CLUSTERS),
        help="name of the cluster (default: cpu or h100, depending on resources.device)",
    )
    command.add_argument(
        "--accelerator",
        nargs="+",
        metavar="FIELD=NUMBER",
        help="own accelerator instead of --cluster: a JSON file with these fields, or FIELD=NUMBER for each: "
        + "; ".join(f"{name}: {field.description or 'text'}" for name, field in OwnAccelerator.model_fields.items()),
    )
    command.add_argument(
        "--stack",
        choices=sorted(STACKS),
        help="software stack whose step time is estimated (default: resources.stack of the spec)",
    )
    command.add_argument(
        FLAG,
        action="append",
        default=[],
        metavar=FLAG_EXAMPLE,
        help="measured step of one layout, which corrects all step times; tokens_per_s_per_gpu can replace step_s",
    )
    for name in SOFTWARE_FLAGS:
        words = f"option of the software stack: {SoftwareSpec.model_fields[name].description}"
        command.add_argument(f"--{name.replace('_', '-')}", help=words)
    for name in MEMORY_FLAGS:
        words = f"memory only: {MemoryOptions.model_fields[name].description}"
        command.add_argument(f"--{name.replace('_', '-')}", help=words)
    for name in LAYOUT_FLAGS:
        command.add_argument(f"--{name.replace('_', '-')}", help=Layout.model_fields[name].description)
    for name in TRAIN_FLAGS:
        command.add_argument(f"--{name.replace('_', '-')}", help=TrainSpec.model_fields[name].description)


def _data(options: argparse.Namespace) -> dict[str, Any]:
    if options.template:
        data: dict[str, Any] = json.loads(json.dumps(TEMPLATES[options.template].spec))
    elif options.spec:
        data = _read("--spec", options.spec)
    elif not (options.config or options.model):
        data = {}  # of the layout file
    else:
        model = _read_model(options.config) if options.config else PRESETS[options.model].model
        data = {"model": model.model_dump() if options.config else {"preset": options.model}}
        data["resources"] = {"device": "cuda"}
        data["train"] = {"precision": "bf16", "seq_len": min(2048, model.max_seq_len)}
    if getattr(options, "layout", None):
        _add_layout(data, options)
    elif not data:
        text = "`--model` is missing. Add a model, or use --config, --spec, --template, or --layout."
        raise SpecError([Problem("--model", text)])
    _put(data, "resources", {"stack": options.stack} if options.stack else {})
    resources, software = data.get("resources", {}), _parse_flags(options, SOFTWARE_FLAGS)
    if software and isinstance(resources, dict):
        data["resources"] = _put({**resources, "software": resources.get("software") or {}}, "software", software)
    if (memory := _parse_flags(options, MEMORY_FLAGS)) and data.get("memory") is None:
        data["memory"] = {}
    _put(data, "memory", memory)
    _put(data, "layout", _parse_flags(options, LAYOUT_FLAGS))
    _put(data, "train", _parse_flags(options, TRAIN_FLAGS))
    return data


def _put(data: dict[str, Any], section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Merge values into a section. The parser rejects a section that is not an object."""
    held = data.get(section, {})
    if values and isinstance(held, dict):
        data[section] = {**held, **values}
    return data


def _parse_flags(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the flags that were set, with values parsed as JSON."""
    return {name: _value(getattr(options, name)) for name in names if getattr(options, name) is not None}


def _read_model(path: Path) -> ModelSpec:
    """Return the model of a config.json, and print its parameters and notes to standard error."""
    found = parse_config(_read_bytes("--config", path))
    print(f"{count_parameters(found.model):,} parameters", *found.notes, sep="\n", file=sys.stderr)
    return found.model


def _add_layout(data: dict[str, Any], options: argparse.Namespace) -> None:
    """Add the layout of another tool's file, and print what was assumed and not understood to standard error."""
    try:
        found = read_layout(_read_bytes("--layout", options.layout).decode(errors="replace"), options.ranks)
    except SpecError as error:
        problems = [Problem("--layout", problem.message) for problem in error.problems]
        raise SpecError(problems) from None
    lines = [f"Layout of {found.tool} for {found.ranks} ranks.", *found.notes, *found.assumed]
    if found.not_understood:
        lines.append(f"Not understood: {', '.join(found.not_understood)}.")
    print(*lines, sep="\n", file=sys.stderr)
    data["layout"] = found.spec["layout"]
    for section in ("train", "resources"):
        _put(data, section, found.spec[section])
    if "model" not in data:
        if "model" not in found.spec:
            raise SpecError([Problem("--model", "`--model` is missing. The layout file has no complete model.")])
        data["model"] = found.spec["model"]


def _read_bytes(option: str, path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        text = f"`{option}` is {str(path)!r}, which cannot be read: {error.strerror or error}."
        raise SpecError([Problem(option, text)]) from None


def _read(option: str, path: Path) -> dict[str, Any]:
    content = _read_bytes(option, path)
    try:
        data = json.loads(content)
    except ValueError as error:
        raise SpecError([Problem(option, f"`{option}` is {str(path)!r}, which is not JSON: {error}.")]) from None
    if not isinstance(data, dict):
        what = "a job spec" if option == "--spec" else "an accelerator"
        raise SpecError([Problem(option, f"`{option}` does not contain an object. Use the fields of {what}.")])
    return data


def _value(text: str) -> Any:
    """Parse the text of a flag as JSON, or return the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _get_cluster(options: argparse.Namespace, spec: JobSpec) -> Cluster:
    """Return the chosen cluster with the measured steps."""
    steps = parse_measured_steps([parse_flag(text) for text in options.measured_step])
    return add_measured_steps(_choose_cluster(options, spec), spec, steps)


def _choose_cluster(options: argparse.Namespace, spec: JobSpec) -> Cluster:
    if options.accelerator:
        return _read_accelerator(options)
    if options.cluster:
        return CLUSTERS[options.cluster]
    if options.template:
        return CLUSTERS[TEMPLATES[options.template].cluster]
    return get_default_cluster(spec)


def _read_accelerator(options: argparse.Namespace) -> Cluster:
    """Return the cluster of an own accelerator from a JSON file or from FIELD=NUMBER arguments."""
    if options.cluster:
        text = f"`--cluster` is {options.cluster}, but `--accelerator` describes another cluster. Use one of them."
        raise SpecError([Problem("--accelerator", text)])
    parts: list[str] = options.accelerator
    try:
        if len(parts) == 1 and "=" not in parts[0]:
            return build_own_cluster(_read("--accelerator", Path(parts[0])))
        return parse_own_cluster(",".join(parts))
    except SpecError as error:
        named = [problem.message.replace("`cluster", "`--accelerator") for problem in error.problems]
        raise SpecError([Problem("--accelerator", text) for text in named]) from None


def _estimate(options: argparse.Namespace) -> int:
    spec = parse_plannable(_data(options))
    cluster = _get_cluster(options, spec)
    made: Estimate = estimate(spec, cluster)
    advice = suggest_layouts(spec, cluster)
    if options.json:
        print(json.dumps({**made, "suggestions": [{"change": n.change, "reason": n.reason} for n in advice]}))
    else:
        print(format_estimate(spec, made, advice))
    return 0


def _search(options: argparse.Namespace) -> int:
    data = _data(options)
    fixed = _parse_flags(options, CHOSEN)
    memory = round(options.max_memory_gib * 2**30) if options.max_memory_gib else None
    constraints = Constraints(options.ranks, fixed, options.max_micro_batch, memory)
    check_constraints(constraints)
    if isinstance(train := data.get("train"), dict):
        train.pop("micro_batches", None)
    spec = reset_dry_ranks(parse_fields({**data, "layout": fixed}))
    cluster = _get_cluster(options, spec)
    result = search(spec, cluster, constraints, limit=options.limit)
    near = find_allowed_neighbors(result.best[0].spec, cluster, constraints) if result.best else []
    if options.json:
        rows = [
            {
                "layout": f.spec.layout.model_dump(),
                "micro_batches": f.spec.train.micro_batches,
                "step_s": f.timing.step_s,
                "mfu": f.timing.mfu,
                "memory_bytes": f.memory_bytes,
            }
            for f in result.best
        ]
        counts = {"considered": result.considered, "fitting": result.fitting, "refused": result.refused}
        print(json.dumps({"best": rows, **counts, "seconds": result.seconds}))
    else:
        print(format_search(result, near, cluster))
    return 0 if result.best else 1


def _auto(options: argparse.Namespace) -> int:
    data = _data(options)
    choices = {name: _some(getattr(options, name)) for name in CHOSEN if getattr(options, name) is not None}
    limits = {name: getattr(options, name) for name in ("ranks", "max_ranks", "max_micro_batch")}
    limits["max_memory_bytes"] = round(options.max_memory_gib * 2**30) if options.max_memory_gib else None
    layout = data.get("layout")
    within = layout.get("auto") if isinstance(layout, dict) else None
    flags = {**choices, **{name: value for name, value in limits.items() if value is not None}}
    auto_spec = parse_auto_spec({"layout": {"auto": {**(within or {}), **flags}}})
    assert auto_spec is not None
    spec = parse_draft(data)
    cluster = _get_cluster(options, spec)
    slots = max(cluster.per_node, auto_spec.ranks or auto_spec.max_ranks or 0)
    choice = find_fastest_layout(
        spec, cluster, auto_spec, Capacity([HostCapacity(slots, cluster.accelerator.memory_bytes)]), runnable=False
    )
    if options.json:
        print(json.dumps({"spec": choice.spec.model_dump(), "chosen": choice.chosen}))
    else:
        print(format_auto(choice.chosen))
    return 0


def _some(text: str) -> Any:
    """Parse one value, or several values between commas."""
    return [_value(part) for part in text.split(",")] if "," in text else _value(text)


def _explain(options: argparse.Namespace) -> int:
    spec = parse_plannable(_data(options))
    cluster, stage = _get_cluster(options, spec), options.stage
    if stage is None:
        stage = max(range(spec.layout.pp), key=lambda index: sum(get_rank_memory(spec, index, cluster).values()))
    if not 0 <= stage < spec.layout.pp:
        print(f"`--stage` is {stage}. Use 0 to {spec.layout.pp - 1}.", file=sys.stderr)
        return 2
    made = explain(spec, cluster, stage=stage)
    print(json.dumps(made) if options.json else format_explanations(made))
    return 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
