"""Copy checkpoints between hosts without a shared root, and from a host outside the attempt."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from planner.facts.parse_spec import parse_spec
from tests.support.processes import scale_timeout
from tests.support.ranks import run_ranks
from workers.checkpoint import folder
from workers.checkpoint import transfer as borrowing
from workers.checkpoint.lend import (
    CHUNK_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    BadOfferError,
    CheckpointSender,
    Offer,
    compute_proof,
    decode_offer,
    encode_offer,
)
from workers.checkpoint.transfer import borrow
from workers.trainer.errors import UserError

SECRET, OTHER = "5e" * 32, "00" * 32
LEAST = (1, 20)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = tmp_path_factory.mktemp("apart")
    done = run_ranks(3, "tests.workers.checkpoint.transfer_ranks", str(base))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((base / f"said-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.slow
def test_collects_a_checkpoint_on_one_host_and_copies_it_to_the_others(messages: list[dict[str, Any]]) -> None:
    assert [one["damage"] for one in messages] == [None] * 3
    assert "1/step-00000007" in messages[1]["have"]
    assert [one["left"] for one in messages] == [False] * 3, "no draft stays behind"


@pytest.mark.slow
def test_fails_on_all_ranks_if_one_host_cannot_write(messages: list[dict[str, Any]]) -> None:
    for one in messages:
        assert one["problem"].startswith("Cannot copy the checkpoint to this host: ")
        assert "2" in one["problem"]
    assert messages[1]["have"] == ["1/step-00000007"], "what it had stays"


@pytest.mark.slow
def test_checks_the_copy_of_each_host(messages: list[dict[str, Any]]) -> None:
    """Check files on each host, because copies can differ."""
    assert [one["looked"] for one in messages] == ["__0_0.distcp changed after it was written (CRC-32 differs)"] * 3


@pytest.mark.slow
def test_copies_the_previous_checkpoint_if_the_newest_is_damaged(messages: list[dict[str, Any]]) -> None:
    assert [one["brought"] for one in messages] == [[4], [4, 8], [4]]
    assert [one["passed over"] for one in messages] == [[[1, 8]]] * 3, (
        "a run that expects it hears why it begins before"
    )
    assert [one["of others' folders"] for one in messages] == [[]] * 3


@pytest.mark.slow
def test_replaces_a_truncated_copy_from_another_host(messages: list[dict[str, Any]]) -> None:
    """Copy a checkpoint again if all hosts have it and one copy is truncated."""
    assert [one["mended"] for one in messages] == ["whole"] * 3


def publish_empty(job: Path, attempt: int, step: int) -> None:
    draft = folder.get_draft_path(folder.get_step_folder(job / str(attempt), step))
    draft.mkdir(parents=True)
    folder.publish(draft, parse_spec({"model": {"preset": "gpt-tiny"}}), step, {}, [], {})


def test_requires_the_reported_checkpoint_or_a_later_one(tmp_path: Path) -> None:
    job = tmp_path / "job"

    def require_expected(expected: str) -> None:
        folder.require_expected(folder.list_complete(job)[::-1], expected, "anna")

    with pytest.raises(
        UserError, match=r"Checkpoint job/1/step-00000020 .* on host anna is missing .* Newest checkpoint here: none\."
    ):
        require_expected("job/1/step-00000020")
    publish_empty(job, 1, 10)
    with pytest.raises(UserError, match=r"Newest checkpoint here: 1/step-00000010\."):
        require_expected("job/1/step-00000020")
    require_expected("job/1/step-00000010")
    publish_empty(job, 2, 5)
    require_expected("job/1/step-00000020")  # a later attempt resumed from it


def publish(job: Path, attempt: int, step: int) -> Path:
    draft = folder.get_draft_path(folder.get_step_folder(job / str(attempt), step))
    draft.mkdir(parents=True)
    (draft / "__0_0.distcp").write_bytes(bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"more than two chunks")
    (draft / ".metadata").write_bytes(b"")
    files = folder.describe_files(draft, ["__0_0.distcp", ".metadata"])
    return folder.publish(draft, parse_spec({"model": {"preset": "gpt-tiny"}}), step, files, [1], {})


@contextmanager
def lent(job: Path) -> Iterator[int]:
    """Serve the newest checkpoint of a job, and yield the port."""
    door = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        lending = CheckpointSender(job, SECRET)
        loop.append((asyncio.get_running_loop(), lending.stop))
        async with await asyncio.start_server(lending.serve, sock=door):
            up.set()
            await lending.sent_all

    loop: list[tuple[asyncio.AbstractEventLoop, object]] = []
    up = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    up.wait(scale_timeout(10))
    try:
        yield int(door.getsockname()[1])
    finally:
        running, stop = loop[0]
        with suppress(RuntimeError):  # it is over, and its loop closed
            running.call_soon_threadsafe(stop)  # type: ignore[arg-type]
        thread.join(scale_timeout(10))


def told(path: Path, port: int, secret: str = SECRET) -> Path:
    path.write_text(json.dumps({"host": "anna", "address": "127.0.0.1", "port": port, "secret": secret}))
    return path


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    job = tmp_path / "anna" / "job"
    publish(job, 1, 20)
    return job


@pytest.mark.parametrize("part", [CHUNK_BYTES + 1, borrowing.PART_BYTES])
def test_copies_the_newest_checkpoint_and_keeps_older_ones(
    part: int, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowing, "PART_BYTES", part)
    newest, actual = publish(reference, 1, 30), tmp_path / "job"
    publish(actual, 1, 10)
    (folder.get_step_folder(actual / "1", 30) / "half deleted").mkdir(parents=True)
    with lent(reference) as port:
        came = borrow(actual, told(tmp_path / "loan", port), LEAST, None, 2)
    assert (came.problem, came.name) == ("", "1/step-00000030")
    older, have = folder.list_complete(actual)
    assert older.step == 10, "what came is judged only when it is loaded"
    assert {path.name: path.read_bytes() for path in have.path.iterdir()} == {
        path.name: path.read_bytes() for path in newest.iterdir()
    }
    assert came.num_bytes == sum(path.stat().st_size for path in newest.iterdir())
    assert list(actual.glob("*/.*")) == [], "no draft is left"


def test_rejects_a_wrong_secret_and_serves_the_next_borrower(tmp_path: Path, reference: Path) -> None:
    with lent(reference) as port:
        came = borrow(tmp_path / "stranger", told(tmp_path / "guessed", port, OTHER), LEAST, None, 2)
        assert came.problem == "Host anna could not send the checkpoint: BadOfferError: a different host answered"
        with closing(socket.create_connection(("127.0.0.1", port))) as silent:
            silent.sendall(b"\0" * 64)  # a nonce, and a wrong proof of the secret
            with silent.makefile("rb") as messages:
                assert len(messages.read()) == 64, "a nonce and a proof, and no word of the checkpoint"
        assert borrow(tmp_path / "job", told(tmp_path / "loan", port), LEAST, None, 2).problem == ""
        late = borrow(tmp_path / "late", told(tmp_path / "loan", port), LEAST, None, 2)
    assert late.problem.startswith("Host anna could not send the checkpoint: "), "it is sent once"
    assert not (tmp_path / "stranger").exists()


def test_serves_only_one_borrower(tmp_path: Path, reference: Path) -> None:
    with lent(reference) as port, closing(socket.create_connection(("127.0.0.1", port))) as first:
        first.sendall(b"\0" * NONCE_BYTES)
        with first.makefile("rb") as messages:
            nonce, _ = messages.read(NONCE_BYTES), messages.read(PROOF_BYTES)
            first.sendall(compute_proof(SECRET, "borrower", nonce, b"\0" * NONCE_BYTES))
            assert messages.read(4), "it is sent"
            second = borrow(tmp_path / "job", told(tmp_path / "loan", port), LEAST, None, 2)
    assert second.problem.startswith("Host anna could not send the checkpoint: ")


def test_rejects_a_lender_without_the_secret(tmp_path: Path) -> None:
    """Reject a process that took over the port."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def lie() -> None:
            connection, _ = door.accept()
            with connection:
                connection.recv(32)
                connection.sendall(b"\0" * 64 + encode_offer(Offer("1/step-00000020", {})))

        liar = threading.Thread(target=lie)
        liar.start()
        came = borrow(tmp_path / "job", told(tmp_path / "loan", door.getsockname()[1]), LEAST, None, 2)
        liar.join(scale_timeout(10))
    assert came.problem.endswith("a different host answered")
    assert not (tmp_path / "job").exists()


def test_names_the_host_if_a_checkpoint_cannot_be_copied(tmp_path: Path, reference: Path) -> None:
    actual, loan = tmp_path / "job", tmp_path / "loan"
    with socket.create_server(("127.0.0.1", 0)) as door:
        gone = door.getsockname()[1]
    assert (
        borrow(actual, told(loan, gone), LEAST, None, 2).problem
        == "Host anna could not send the checkpoint: Connection refused"
    )
    with lent(reference) as port:
        older = borrow(actual, told(loan, port), (1, 21), None, 2)
    assert older.problem == "The newest checkpoint on host anna is 1/step-00000020"
    with lent(tmp_path / "nobody's") as port:
        none = borrow(actual, told(loan, port), LEAST, None, 2)
    assert none.problem == "Host anna reports: this host has no complete checkpoint of the job"
    (reference / "1" / "step-00000020" / "__0_0.distcp").write_bytes(b"cut off")
    with lent(reference) as port:
        short = borrow(actual, told(loan, port), LEAST, None, 2)
    assert short.problem == f"Host anna closed the connection with {2 * CHUNK_BYTES + 13:,} bytes of __0_0.distcp left"
    (reference / "1" / "step-00000020" / "__0_0.distcp").unlink()
    os.mkfifo(reference / "1" / "step-00000020" / "__0_0.distcp")
    with lent(reference) as port:
        pipe = borrow(actual, told(loan, port), LEAST, None, 2)
    assert "closed" in pipe.problem
    assert folder.list_complete(actual) == []
    assert list(actual.glob("*/.*")) == []


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("../1/step-00000020", {}, "is not a checkpoint name"),
        ("1/step-00000020", {"../manifest.json": 1}, "is not a file name"),
        ("1/step-00000020", {"..": 1}, "is not a file name"),
        ("1/step-00000020", {"": 1}, "is not a file name"),
        ("1/step-00000020", {"a": -1}, "is -1"),
        ("1/step-00000020", {"a": True}, "is True"),
    ],
)
def test_rejects_an_offer_with_files_outside_its_folder(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(BadOfferError, match=message):
        decode_offer(encode_offer(Offer(name, sizes))[4:])


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"name": "1/step-00000020"}', b'{"sizes": 3, "name": 1}'])
def test_rejects_an_invalid_offer(body: bytes) -> None:
    with pytest.raises(BadOfferError, match="is invalid"):
        decode_offer(body)


def test_a_damaged_copy_deletes_no_other_checkpoint(tmp_path: Path, reference: Path) -> None:
    """Keep older checkpoints if the received files are damaged."""
    newest, actual = publish(reference, 1, 30), tmp_path / "job"
    publish(actual, 1, 10)
    spoilt = newest / "__0_0.distcp"
    spoilt.write_bytes(b"!" + spoilt.read_bytes()[1:])
    with lent(reference) as port:
        found = borrow(actual, told(tmp_path / "loan", port), LEAST, None, keep=1)
    assert found.problem.startswith("The checkpoint from host anna is damaged: __0_0.distcp changed")
    assert [path.path.name for path in folder.list_complete(actual)] == ["step-00000010"]


def test_keeps_the_saved_checkpoint_next_to_later_ones(tmp_path: Path) -> None:
    """Keep step 35 of a run that resumed from step 30, next to damaged later steps."""
    for step in (30, 40, 50):
        publish(tmp_path, 1, step)
    saved = publish(tmp_path, 1, 35)
    assert folder.retain_newest(tmp_path / "1", 2, saved) == ["step-00000030"]
    assert saved.is_dir()
