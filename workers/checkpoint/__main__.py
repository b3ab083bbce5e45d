"""List, evaluate, sample from, and export checkpoints: `python -m workers.checkpoint`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from workers.checkpoint.folder import list_complete, read_manifest
from workers.checkpoint.inference import (
    LoadedModel,
    decode_tokens,
    encode_prompt,
    evaluate,
    export,
    find_tokenizer,
    get_text_encoder,
    load_model,
    sample,
)
from workers.trainer.errors import UserError


def main() -> int:
    options = _parser().parse_args()
    try:
        if options.command == "list":
            return _list(options.root)
        loaded = load_model(options.checkpoint, _warn)
        print(_COMMANDS[options.command](loaded, options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", help="list the complete checkpoints below a folder")
    listed.add_argument("root", type=Path)
    for name, words in (
        ("evaluate", "compute the mean loss on held-out data"),
        ("sample", "text"),
        ("export", "write safetensors for transformers"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument(
            "checkpoint", type=Path, help="checkpoint folder; if it contains several checkpoints, the newest is used"
        )
        if name == "evaluate":
            command.add_argument("--data", help="data to evaluate, as in train.data (default: the data of the job)")
            command.add_argument("--data-root", type=Path, required=True)
            command.add_argument("--sequences", type=int, default=16)
        elif name == "sample":
            command.add_argument("--prompt", default="def ", help="text that the model continues")
            command.add_argument("--tokens", type=int, default=200)
            command.add_argument("--temperature", type=float, default=0.8)
            command.add_argument("--seed", type=int, default=0)
        else:
            command.add_argument("--out", type=Path, required=True, help="new folder")
        if name != "evaluate":
            command.add_argument("--data-root", type=Path, help="data root that contains the tokenizer of the job")
            command.add_argument(
                "--tokenizer", type=Path, help="tokenizers JSON file (default: the tokenizer of the job)"
            )
    return parser


def _list(root: Path) -> int:
    for checkpoint in list_complete(root):
        try:
            manifest = read_manifest(checkpoint.path)
        except UserError as error:
            print(f"{checkpoint.get_name(root):<48}{'damaged':>15}  {error}")
            continue
        size = sum(num_bytes for num_bytes, _ in manifest.files.values())
        layout, model = manifest.spec.layout, manifest.spec.model
        axes = " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("dp", "pp", "tp", "cp", "ep"))
        shown = f"{model.preset or model.arch} {axes} zero{layout.zero}"
        print(f"{checkpoint.get_name(root):<48}{size / 1e6:>12,.1f} MB  {shown}")
    return 0


def _evaluate(loaded: LoadedModel, options: argparse.Namespace) -> str:
    if options.sequences < 1:
        raise UserError(f"`--sequences` is {options.sequences}. Use at least 1.")
    data = options.data or loaded.spec.train.data
    loss = evaluate(loaded, data, options.data_root, options.sequences)
    return f"step {loaded.step}: {loss:.6f} nats per token on {options.sequences} held-out sequences of {data}"


def _sample(loaded: LoadedModel, options: argparse.Namespace) -> str:
    if not options.temperature >= 0:  # also rejects NaN
        raise UserError(f"`--temperature` is {options.temperature}. Use at least 0.")
    if options.tokens < 0:
        raise UserError(f"`--tokens` is {options.tokens}. Use at least 0.")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"`--seed` is {options.seed}. Use at least 0 and less than 2**63.")
    encoder = get_text_encoder(loaded.spec, options.tokenizer, options.data_root)
    prompt = encode_prompt(encoder, options.prompt)
    return decode_tokens(encoder, prompt + sample(loaded, prompt, options.tokens, options.temperature, options.seed))


def _export(loaded: LoadedModel, options: argparse.Namespace) -> str:
    encoder = find_tokenizer(loaded.spec, options.tokenizer, options.data_root)
    if encoder is None and loaded.spec.train.tokenizer is not None:
        name = loaded.spec.train.tokenizer
        _warn(f"tokenizer.json is missing. To add the tokenizer {name!r} of the job, use --data-root or --tokenizer.")
    folder = export(loaded, options.out, encoder)
    return f"{folder}: step {loaded.step}, {', '.join(sorted(path.name for path in folder.iterdir()))}"


_COMMANDS: dict[str, Callable[[LoadedModel, argparse.Namespace], str]] = {
    "evaluate": _evaluate,
    "sample": _sample,
    "export": _export,
}


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
