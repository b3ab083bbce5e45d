"""Never execute code in the `.metadata` of a checkpoint."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.workers.checkpoint.poison import Runs, plant, poison
from tests.workers.checkpoint.runs import make_spec, run
from tests.workers.checkpoint.test_loan import lent, told
from tests.workers.checkpoint.test_whole import command
from workers.checkpoint.folder import find_damage, list_complete, read_manifest
from workers.checkpoint.load import METADATA
from workers.checkpoint.transfer import borrow

REFUSED = ".metadata is refused: builtins.eval is not allowed"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints") / "root"
    run(make_spec({"dp": 2, "zero": 2}, checkpoint_every=3, keep_checkpoints=2), root)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def newest(root: Path) -> Path:
    return list_complete(root / "job")[-1].path


def test_torch_executes_the_planted_code(root: Path, mark: Path) -> None:
    """Check that the other tests can fail."""
    poison(newest(root), mark)
    manifest = read_manifest(newest(root))
    assert find_damage(newest(root), manifest.files) is None, "as it was written, by its checksums"
    FileSystemReader(newest(root)).read_metadata()
    assert mark.exists()


def test_a_resumed_run_skips_a_malicious_checkpoint(root: Path, mark: Path) -> None:
    poison(newest(root), mark)
    ran = run(make_spec({"dp": 2}, resume="job", steps=8), root, job="other")
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
    root: Path, mark: Path, tmp_path: Path, name: str, planted: Callable[[Path, Path], None]
) -> None:
    options = {
        "evaluate": ["--data-root", str(root.parent / "data")],
        "sample": ["--tokens", "1"],
        "export": ["--out", str(tmp_path / "out")],
    }
    for checkpoint in list_complete(root / "job"):
        planted(checkpoint.path, mark)
    done = command(name, str(root / "job"), *options[name])
    assert not mark.exists()
    assert done.returncode == 2
    assert done.stderr.count("step-00000003: .metadata is refused: ") == 1, done.stderr
    assert (REFUSED in done.stderr) == (planted is poison)


def test_refuses_a_malicious_checkpoint_of_another_host(root: Path, mark: Path, tmp_path: Path) -> None:
    poison(newest(root), mark)
    with lent(root / "job") as port:
        came = borrow(tmp_path / "ours" / "job", told(tmp_path / "loan", port), (1, 6), None, 2)
    assert (came.problem, came.name) == ("", "1/step-00000006"), "it is whole, and is not looked into"
    done = command("sample", str(tmp_path / "ours" / "job"), "--tokens", "1")
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
    ("change", "says"),
    [
        (_elsewhere, "other', which is not a file of the checkpoint"),
        (_beyond, "which has"),
        (_outside, "has a shard outside the tensor"),
        (_nowhere, "that no file stores"),
    ],
)
def test_metadata_that_does_not_match_the_files_is_damaged(
    root: Path, tmp_path: Path, change: Callable[[Any, Path], None], says: str
) -> None:
    other = tmp_path / "other"
    shutil.copy(next(newest(root).glob("*.distcp")), other)
    metadata = pickle.loads((newest(root) / METADATA).read_bytes())
    change(metadata, other)
    plant(newest(root), pickle.dumps(metadata))
    done = command("sample", str(root / "job"), "--tokens", "1")
    (line,) = [line for line in done.stderr.splitlines() if line.endswith("Trying the previous checkpoint.")]
    assert line.startswith("checkpoint step-00000006 is damaged: .metadata is wrong: ")
    assert says in line
    assert done.returncode == 0
