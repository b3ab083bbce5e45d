"""Damaged checkpoints are never loaded, and code in `.metadata` is never executed."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.workers.checkpoint.runs import Ran, Runs, make_spec, plant, poison, run
from tests.workers.checkpoint.test_inference import call_main
from tests.workers.checkpoint.test_transfer import lent, told
from workers.checkpoint.folder import MANIFEST, find_damage, list_complete, read_manifest
from workers.checkpoint.load import METADATA, find_undamaged
from workers.checkpoint.transfer import borrow

WEIGHT = "model.embedding.weight"
REFUSED = ".metadata is refused: builtins.eval is not allowed"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints") / "root"
    run(make_spec({"dp": 2, "zero": 2}, checkpoint_every=2, keep_checkpoints=3), root)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def resumed(root: Path, resume: str = "job", **train: object) -> Ran:
    return run(make_spec({}, resume=resume, steps=8, **train), root, job="other")


def newest(root: Path) -> Path:
    return list_complete(root / "job")[-1].path


def test_names_a_truncated_file_and_loads_the_previous_checkpoint(root: Path) -> None:
    file = sorted(newest(root).glob("*.distcp"))[0]
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 7)
    ran = resumed(root)
    told = f"checkpoint step-00000006 is damaged: {file.name} has {size - 7:,} of {size:,} bytes"
    assert f"{told}. Trying the previous checkpoint." in ran.output
    assert sorted(ran.losses) == [5, 6, 7, 8]


@pytest.mark.slow
def test_detects_a_changed_byte(root: Path) -> None:
    file = sorted(newest(root).glob("*.distcp"))[-1]
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))
    ran = resumed(root)
    assert f"{file.name} changed after it was written (CRC-32 differs). Trying the previous checkpoint." in ran.output
    assert sorted(ran.losses) == [5, 6, 7, 8]


@pytest.mark.slow
def test_ignores_drafts(root: Path) -> None:
    newest(root).rename(root / "job" / "1" / ".step-00000006.draft")
    assert sorted(resumed(root).losses) == [5, 6, 7, 8]


@pytest.mark.slow
def test_lists_the_damage_of_each_checkpoint_if_none_is_undamaged(root: Path) -> None:
    for checkpoint in list_complete(root / "job"):
        (checkpoint.path / ".metadata").unlink()
    problem = resumed(root).problem
    assert problem is not None
    assert problem.startswith("`train.resume` has no undamaged checkpoint. step-00000006: cannot read .metadata")
    assert "step-00000002: cannot read .metadata" in problem


@pytest.mark.slow
def test_rejects_an_unknown_checkpoint_and_lists_complete_ones(root: Path) -> None:
    complete = "Complete checkpoints: step-00000002, step-00000004, step-00000006."
    assert complete in str(resumed(root, "job/1/step-00000005").problem)
    assert "`train.resume` is 'jobless', which has no complete checkpoint." in str(resumed(root, "jobless").problem)


@pytest.mark.slow
def test_rejects_a_different_model_and_a_finished_run(root: Path) -> None:
    other = run(make_spec({}, "llama", resume="job"), root, job="other")
    assert "has a different model: arch is gpt in the checkpoint and llama in the job" in str(other.problem)
    done = run(make_spec({}, resume="job"), root, job="other")
    assert "`train.steps` is 6, but the checkpoint already has 6 steps. Increase `train.steps`." in str(done.problem)


@pytest.mark.slow
def test_keeps_only_the_newest_checkpoints(saved: Path, tmp_path: Path) -> None:
    assert [c.step for c in list_complete(saved / "job")] == [2, 4, 6]
    ran = run(make_spec({}, checkpoint_every=1, keep_checkpoints=2), tmp_path / "root")
    assert [c.step for c in list_complete(tmp_path / "root" / "job")] == [5, 6]
    assert len(ran.of_kind("checkpoint")) == 6


@pytest.mark.slow
def test_deletes_abandoned_drafts_at_the_next_save(tmp_path: Path) -> None:
    """Delete drafts of this and earlier attempts, but not of later attempts or steps."""
    folders = ["1/.step-00000099", "2/.step-00000005", "2/.step-00000007", "3/.step-00000001"]
    left = [tmp_path / "root" / "job" / f"{name}.draft" for name in folders]
    for draft in left:
        draft.mkdir(parents=True)
        (draft / "__0_0.distcp").write_bytes(b"half")
    run(make_spec({}, checkpoint_every=6), tmp_path / "root", attempt=2)
    assert [draft.exists() for draft in left] == [False, False, True, True]


@pytest.mark.slow
def test_training_continues_if_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "job").write_text("a file where a folder must be")
    ran = run(make_spec({"dp": 2}, checkpoint_every=3), root)
    assert sorted(ran.losses) == [1, 2, 3, 4, 5, 6]
    failed = ran.of_kind("checkpoint")
    assert [item["name"] for item in failed] == [None, None]
    assert all("Not a directory" in item["problem"] for item in failed)
    assert "Cannot write the checkpoint after step 3" in ran.output


def rewritten(checkpoint: Path, text: Callable[[dict[str, Any]], str]) -> None:
    manifest = checkpoint / MANIFEST
    manifest.write_text(text(json.loads(manifest.read_text())))


def with_fields(**changes: object) -> Callable[[Path], None]:
    return lambda checkpoint: rewritten(checkpoint, lambda content: json.dumps(content | changes))


def with_file(name: str, entry: object) -> Callable[[Path], None]:
    return lambda checkpoint: rewritten(
        checkpoint, lambda content: json.dumps(content | {"files": content["files"] | {name: entry}})
    )


def with_text(text: str) -> Callable[[Path], None]:
    return lambda checkpoint: rewritten(checkpoint, lambda _: text)


def with_metadata(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the metadata of a checkpoint, and update the manifest."""

    def changed(checkpoint: Path) -> None:
        metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
        change(metadata.state_dict_metadata)
        plant(checkpoint, pickle.dumps(metadata))

    return changed


def without_a_file(checkpoint: Path) -> None:
    """Remove a file and its entry in the manifest."""
    name = sorted(path.name for path in checkpoint.glob("*.distcp"))[0]
    (checkpoint / name).unlink()
    rewritten(
        checkpoint,
        lambda content: json.dumps(content | {"files": {k: v for k, v in content["files"].items() if k != name}}),
    )


def linked(checkpoint: Path) -> None:
    """Replace a file with a symlink."""
    file = sorted(checkpoint.glob("*.distcp"))[0]
    file.symlink_to(file.rename(checkpoint.parents[2] / "elsewhere"))


def truncated_as_written(checkpoint: Path) -> None:
    file = sorted(checkpoint.glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes()[:1000])
    plant(checkpoint, (checkpoint / ".metadata").read_bytes(), file.name)


def cut(checkpoint: Path) -> None:
    plant(checkpoint, (checkpoint / ".metadata").read_bytes()[:2000])


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a step below none": (with_fields(step=-5), "cannot read manifest.json: the step is -5"),
    "a step that is a float": (with_fields(step=1e308), "the step is 1e+308"),
    "a step that is no number": (with_fields(step=float("nan")), "the step is nan"),
    "a step without end": (with_fields(step=float("inf")), "the step is inf"),
    "a step that is true": (with_fields(step=True), "the step is True"),
    "another's step": (with_fields(step=4), "the step is 4"),
    "no files": (with_fields(files={}), "the list of files is missing"),
    "files in a list": (with_fields(files=[]), "the list of files is missing"),
    "files that are none": (with_fields(files=None), "the list of files is missing"),
    "a file elsewhere": (with_file("../step-00000004/.metadata", [1, 1]), "is not a file name"),
    "a file without a size": (with_file("one", [1]), "size and CRC-32 of one are missing"),
    "a file of less than nothing": (with_file("one", [-1, 1]), "size or CRC-32 of one is invalid"),
    "a short rng": (with_fields(rng=[1]), "the random generator state is invalid"),
    "an rng of zeros": (with_fields(rng=[0] * 5056), "the random generator state is invalid"),
    "an rng of text": (with_fields(rng="x"), "the random generator state is not bytes"),
    "an rng of no bytes": (with_fields(rng=[300] * 5056), "the random generator state is not bytes"),
    "a spec of text": (with_fields(spec="x"), "the spec has no model"),
    "a model in a list": (with_fields(spec={"model": []}), "the spec has no model"),
    "a version to come": (with_fields(version=2), "the version is 2, expected 1"),
    "a list": (with_text("[]"), "the JSON is not an object"),
    "nothing": (with_text("{}"), "'version' is missing"),
    "no JSON": (with_text("{"), "cannot read manifest.json: "),
    "too deep": (with_text("[" * 100_000), "the JSON is nested too deep"),
    "too long": (with_text(" " * (16 * 2**20 + 1)), "more than 16,777,216 bytes"),
    "a number of 5,000 digits": (with_text('{"step": ' + "9" * 5000 + "}"), "cannot read manifest.json: "),
    "files that nobody names": (without_a_file, "which is not a file of the checkpoint"),
    "a link": (linked, "cannot read __0_0.distcp: "),
    "a file cut off before its checksum was taken": (truncated_as_written, "of __0_0.distcp, which has 1,000"),
    "metadata cut off": (cut, ".metadata is refused: damaged"),
    "metadata of other things": (lambda c: plant(c, pickle.dumps({"a": 1})), ".metadata is refused: damaged"),
    "metadata that is text": (lambda c: plant(c, b"garbage"), ".metadata is refused: byte 0"),
    "no weight": (with_metadata(lambda told: told.pop(WEIGHT)), f".metadata is wrong: '{WEIGHT}' is missing"),
    "no parts": (with_metadata(lambda told: told[WEIGHT].chunks.clear()), f"'{WEIGHT}' has 0 of "),
    "half of it": (with_metadata(lambda told: told[WEIGHT].chunks.pop()), f"'{WEIGHT}' has "),
    "another shape": (
        with_metadata(lambda told: setattr(told[WEIGHT], "size", torch.Size((9999, *told[WEIGHT].size[1:])))),
        f"'{WEIGHT}' has shape [9999, ",
    ),
    "no moments": (
        with_metadata(lambda told: told.pop("exp_avg.embedding.weight")),
        "'exp_avg.embedding.weight' is missing",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_names_invalid_content_and_loads_the_previous_checkpoint(root: Path, name: str) -> None:
    change, message = ODD[name]
    change(newest(root))
    messages: list[str] = []
    found = find_undamaged(list_complete(root / "job")[::-1], None, messages.append)
    (line,) = messages
    assert line.startswith("checkpoint step-00000006 is damaged: ")
    assert message in line
    assert line.count("step-00000006") == 1, "it is named once"
    assert line.endswith(". Trying the previous checkpoint.")
    assert (found.checkpoint.step, found.manifest.step) == (4, 4)


def test_all_ranks_load_the_same_previous_checkpoint(root: Path) -> None:
    cut(newest(root))
    ran = run(make_spec({"dp": 2}, resume="job", steps=8), root, job="other")
    assert "checkpoint step-00000006 is damaged: .metadata is refused: damaged" in ran.output
    assert sorted(ran.losses) == [5, 6, 7, 8]


def test_list_marks_damaged_checkpoints(root: Path) -> None:
    with_fields(step=-5)(newest(root))
    listed = call_main("list", str(root))
    assert listed.returncode == 0
    lines = listed.stdout.splitlines()
    assert ["damaged" in line for line in lines] == [False, False, True]
    assert "the step is -5" in lines[2]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied_root = tmp_path_factory.mktemp("checkpoints") / "root"
    run(make_spec({"dp": 2, "zero": 2}, checkpoint_every=3, keep_checkpoints=2), copied_root)
    return copied_root


@pytest.fixture
def copied_root(two_checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_checkpoints, tmp_path / "root"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def test_torch_executes_the_planted_code(copied_root: Path, mark: Path) -> None:
    """Check that the other tests can fail."""
    poison(newest(copied_root), mark)
    manifest = read_manifest(newest(copied_root))
    assert find_damage(newest(copied_root), manifest.files) is None, "as it was written, by its checksums"
    FileSystemReader(newest(copied_root)).read_metadata()
    assert mark.exists()


def test_a_resumed_run_skips_a_malicious_checkpoint(copied_root: Path, mark: Path) -> None:
    poison(newest(copied_root), mark)
    ran = run(make_spec({"dp": 2}, resume="job", steps=8), copied_root, job="other")
    assert f"checkpoint step-00000006 is damaged: {REFUSED}. Trying the previous checkpoint." in ran.output
    assert sorted(ran.losses) == [4, 5, 6, 7, 8]
    assert not mark.exists()


def _poison_another(checkpoint: Path, mark: Path) -> None:
    """Plant code in the file that torch reads second."""
    plant(checkpoint, b"")
    (checkpoint / f"__0{METADATA}").write_bytes(pickle.dumps(Runs(mark, None)))


@pytest.mark.parametrize("planted", [poison, _poison_another])
@pytest.mark.parametrize("name", ["evaluate", "sample", "export"])
def test_a_command_refuses_a_malicious_checkpoint(
    copied_root: Path, mark: Path, tmp_path: Path, name: str, planted: Callable[[Path, Path], None]
) -> None:
    options = {
        "evaluate": ["--data-root", str(copied_root.parent / "data")],
        "sample": ["--tokens", "1"],
        "export": ["--out", str(tmp_path / "out")],
    }
    for checkpoint in list_complete(copied_root / "job"):
        planted(checkpoint.path, mark)
    done = call_main(name, str(copied_root / "job"), *options[name])
    assert not mark.exists()
    assert done.returncode == 2
    assert done.stderr.count("step-00000003: .metadata is refused: ") == 1, done.stderr
    assert (REFUSED in done.stderr) == (planted is poison)


def test_refuses_a_malicious_checkpoint_of_another_host(copied_root: Path, mark: Path, tmp_path: Path) -> None:
    poison(newest(copied_root), mark)
    with lent(copied_root / "job") as port:
        came = borrow(tmp_path / "ours" / "job", told(tmp_path / "loan", port), (1, 6), None, 2)
    assert (came.problem, came.name) == ("", "1/step-00000006"), "it is whole, and is not looked into"
    done = call_main("sample", str(tmp_path / "ours" / "job"), "--tokens", "1")
    assert REFUSED in done.stderr
    assert not mark.exists()


def _elsewhere(metadata: Any, other: Path) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = str(other)


def _beyond(metadata: Any, other: Path) -> None:
    next(iter(metadata.storage_data.values())).length = 10**9


def _outside(metadata: Any, other: Path) -> None:
    tensor = metadata.state_dict_metadata["model.embedding.weight"]
    tensor.size = type(tensor.size)((1, *tensor.size[1:]))


def _nowhere(metadata: Any, other: Path) -> None:
    del metadata.storage_data[next(iter(metadata.storage_data))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_elsewhere, "other', which is not a file of the checkpoint"),
        (_beyond, "which has"),
        (_outside, "has a shard outside the tensor"),
        (_nowhere, "that no file stores"),
    ],
)
def test_metadata_that_does_not_match_the_files_is_damaged(
    copied_root: Path, tmp_path: Path, change: Callable[[Any, Path], None], message: str
) -> None:
    other = tmp_path / "other"
    shutil.copy(next(newest(copied_root).glob("*.distcp")), other)
    metadata = pickle.loads((newest(copied_root) / METADATA).read_bytes())
    change(metadata, other)
    plant(newest(copied_root), pickle.dumps(metadata))
    done = call_main("sample", str(copied_root / "job"), "--tokens", "1")
    (line,) = [line for line in done.stderr.splitlines() if line.endswith("Trying the previous checkpoint.")]
    assert line.startswith("checkpoint step-00000006 is damaged: .metadata is wrong: ")
    assert message in line
    assert done.returncode == 0
