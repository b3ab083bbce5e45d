"""Test that archives of scripts are read completely, and that hostile archives are refused."""

from __future__ import annotations

import gzip
import io
import os
import random
import stat
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from contracts import archives
from contracts.archives import ArchiveError, check_archive, read_archive

SCRIPT = b"print('hello')\n"


def make_file(name: str, content: bytes = SCRIPT, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    return info, content


def make_special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def pack_tar(members: Iterable[tuple[tarfile.TarInfo, bytes]], **options: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", **options) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def pack_zip(members: Iterable[tuple[zipfile.ZipInfo | str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def refuse(content: bytes) -> str:
    """Return the message with which an archive is refused."""
    with pytest.raises(ArchiveError) as error:
        check_archive(io.BytesIO(content))
    return str(error.value)


def test_files_and_folders_of_a_tar_archive() -> None:
    folder = tarfile.TarInfo("./pkg")
    folder.type = tarfile.DIRTYPE
    root = tarfile.TarInfo(".")
    root.type = tarfile.DIRTYPE
    # 512 bytes fill a block, and an empty file none.
    members = [(root, b""), (folder, b""), make_file("./pkg/train.py"), make_file("run.sh", b"x" * 512, 0o755)]
    packed = pack_tar([*members, make_file("empty", b""), make_file("größe.txt"), make_file("n" * 200)])
    found = [
        (str(entry.path), entry.is_folder, entry.is_executable, b"".join(entry.parts))
        for entry in read_archive(io.BytesIO(packed))
    ]
    assert found == [
        ("pkg", True, True, b"") if folder.mode & stat.S_IXUSR else ("pkg", True, False, b""),
        ("pkg/train.py", False, False, SCRIPT),
        ("run.sh", False, True, b"x" * 512),
        ("empty", False, False, b""),
        ("größe.txt", False, False, SCRIPT),
        ("n" * 200, False, False, SCRIPT),
    ]


def test_files_and_folders_of_a_zip_archive() -> None:
    packed = pack_zip([("pkg/", b""), ("pkg/train.py", SCRIPT), ("größe.txt", b"")])
    summary = check_archive(io.BytesIO(packed))
    assert summary.paths == ("pkg/train.py", "größe.txt")
    assert summary.num_bytes == len(SCRIPT)


def test_archive_of_the_tar_command_is_read(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_bytes(SCRIPT * 5000)
    target = tmp_path / "all.tar.gz"
    assert os.system(f"cd {tmp_path} && tar czf {target} pkg") == 0
    summary = check_archive(io.BytesIO(target.read_bytes()))
    assert (summary.paths, summary.num_bytes) == (("pkg/train.py",), len(SCRIPT) * 5000)


BAD_NAMES = {
    "/etc/passwd": "leads out of the archive",
    "../train.py": "leads out of the archive",
    "a/../../train.py": "leads out of the archive",
    "a\nb.py": "control character",
    "a\x00b.py": "control character",
    "a\x1b[31m.py": "control character",
    "a\udcff.py": "not a UTF-8 name",
    "n" * 256: "too long",
    "/".join(["n" * 100] * 11): "too long",
    "/".join("n" * 51): "folders deep",
}


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_bad_name_in_a_tar_archive_is_refused(name: str) -> None:
    info, content = make_file(name)
    if "\x00" in name:  # otherwise, a header ends at NUL
        info.pax_headers = {"path": name}
    message = refuse(pack_tar([make_file("good.py"), (info, content)], format=tarfile.PAX_FORMAT))
    assert BAD_NAMES[name] in message
    assert ascii(name[:50])[1:-1] in message
    assert message.isprintable()


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if "\udcff" not in name], ids=ascii)
def test_bad_name_in_a_zip_archive_is_refused(name: str) -> None:
    info = zipfile.ZipInfo("replaced")
    info.filename = info.orig_filename = name
    assert BAD_NAMES[name] in refuse(pack_zip([("good.py", SCRIPT), (info, SCRIPT)]))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (tarfile.SYMTYPE, "is a link"),
        (tarfile.LNKTYPE, "is a link"),
        (tarfile.CHRTYPE, "is a device or a pipe"),
        (tarfile.BLKTYPE, "is a device or a pipe"),
        (tarfile.FIFOTYPE, "is a device or a pipe"),
    ],
)
def test_links_and_devices_in_a_tar_archive_are_refused(kind: bytes, words: str) -> None:
    assert words in refuse(pack_tar([make_file("train.py"), make_special("data", kind, "train.py")]))


def test_sparse_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert os.system(f"cd {tmp_path} && tar czSf all.tar.gz sparse") == 0
    assert "sparse file" in refuse((tmp_path / "all.tar.gz").read_bytes())


def test_links_and_devices_in_a_zip_archive_are_refused() -> None:
    for kind, words in ((stat.S_IFLNK, "is a link"), (stat.S_IFCHR, "is a device"), (stat.S_IFIFO, "is a device")):
        info = zipfile.ZipInfo("data")
        info.external_attr = (kind | 0o644) << 16
        assert words in refuse(pack_zip([(info, b"/etc/passwd")]))


@pytest.mark.parametrize(
    "names", [("a.py", "a.py"), ("a.py", "./a.py"), ("a", "a/b.py"), ("a/b.py", "a"), ("a//b.py", "a/b.py")]
)
def test_repeated_path_is_refused(names: tuple[str, str]) -> None:
    assert "is twice in the archive" in refuse(pack_tar(map(make_file, names)))
    assert "is twice in the archive" in refuse(pack_zip([(name, SCRIPT) for name in names]))


def test_encrypted_zip_and_other_compressions_are_refused() -> None:
    packed = bytearray(pack_zip([("a.py", SCRIPT)]))
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    assert "is encrypted" in refuse(bytes(packed))
    assert "unusual compression" in refuse(pack_zip([("a.py", SCRIPT)], zipfile.ZIP_LZMA))


@pytest.fixture
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 5_000_000)
    monkeypatch.setattr(archives, "MAX_STREAM_BYTES", 30_000_000)


def make_gzip_of_zeros(head: bytes, num_bytes: int) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as packer:
        packer.write(head)
        for _ in range(num_bytes // 10**7):
            packer.write(bytes(10**7))
    return out.getvalue()


def make_zip_bomb() -> bytes:
    return pack_zip([(f"{number}", bytes(1_000_000)) for number in range(8)])


def make_many_files() -> bytes:
    return pack_tar(make_file(str(number), b"") for number in range(10_001))


def make_many_zip_entries() -> bytes:
    return pack_zip([(str(number), b"") for number in range(10_001)])


def make_header(size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo("a.py")
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "large file": (lambda: make_gzip_of_zeros(make_header(10**10, tarfile.REGTYPE), 40_000_000), "more than 5 MB"),
    "large name": (lambda: make_gzip_of_zeros(make_header(10**10, tarfile.GNUTYPE_LONGNAME), 10**7), "too large"),
    "large pax header": (lambda: make_gzip_of_zeros(make_header(10**10, tarfile.XHDTYPE), 10**7), "too large"),
    "large zip": (make_zip_bomb, "more than 5 MB"),
    "many files": (make_many_files, "more than 10,000 files and folders"),
    "many zip entries": (make_many_zip_entries, "more than 10,000 files and folders"),
    "zeros after the end": (lambda: make_gzip_of_zeros(pack_plain_tar(), 40_000_000), "more than 5 MB"),
    "long names in a row": (lambda: gzip.compress(make_header(0, tarfile.GNUTYPE_LONGNAME) * 5000), "damaged"),
}


def pack_plain_tar() -> bytes:
    return gzip.decompress(pack_tar([make_file("a.py")]))


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_with_little_memory_and_time(name: str) -> None:
    make, words = BOMBS[name]
    bomb = make()
    assert len(bomb) < archives.MAX_ARCHIVE_BYTES
    tracemalloc.start()
    began = time.process_time()
    try:
        assert words in refuse(bomb)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 30


@pytest.mark.extended
def test_bomb_with_the_real_limits_is_refused() -> None:
    bomb = make_gzip_of_zeros(make_header(10**10, tarfile.REGTYPE), 300_000_000)
    assert "more than 200 MB" in refuse(bomb)


@pytest.mark.parametrize("pack", [pack_tar, pack_zip])
def test_cut_archive_is_refused(pack: Callable[..., bytes]) -> None:
    noise = random.Random(1).randbytes(3000)
    whole = pack([make_file("a.py", noise)] if pack is pack_tar else [("a.py", noise)])
    for size in range(2, len(whole), 7):
        refuse(whole[:size])


@pytest.mark.parametrize("pack", [pack_tar, pack_zip])
def test_changed_bytes_raise_only_archive_errors(pack: Callable[..., bytes]) -> None:
    rng = random.Random(7)
    files = {f"folder/{number}.py": SCRIPT * number for number in range(20)}
    whole = pack([make_file(*item) for item in files.items()] if pack is pack_tar else files.items())
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            check_archive(io.BytesIO(bytes(changed)))
        except ArchiveError:
            continue


def test_changed_bytes_of_an_unpacked_tar_raise_only_archive_errors() -> None:
    rng = random.Random(8)
    plain = gzip.decompress(pack_tar(make_file(f"folder/{'n' * 120}{number}.py") for number in range(20)))
    for _ in range(300):
        changed = bytearray(plain)
        start = rng.randrange(len(plain) // 512) * 512
        for _ in range(rng.randint(1, 8)):
            changed[start + rng.randrange(512)] = rng.choice((0, 0x2D, 0x31, 0x4B, 0x80, 0xFF, rng.randrange(256)))
        block = bytearray(changed[start : start + 512])
        block[148:156] = b" " * 8
        changed[start + 148 : start + 156] = f"{sum(block):06o}\0 ".encode()  # with a valid checksum
        try:
            check_archive(io.BytesIO(gzip.compress(bytes(changed), 1)))
        except ArchiveError:
            continue


def test_invalid_header_in_the_middle_is_not_the_end() -> None:
    plain = bytearray(gzip.decompress(pack_tar([make_file("a.py"), make_file("b.py")])))
    plain[1024:1028] = b"XXXX"
    assert "damaged" in refuse(gzip.compress(bytes(plain)))


@pytest.mark.parametrize("content", [b"", b"x", b"import torch\n", b"\x1f\x8b", b"PK", b"PK\x05\x06" + bytes(18)])
def test_other_files_are_refused(content: bytes) -> None:
    refuse(content)


def test_archive_without_files_is_refused() -> None:
    assert "contains no file" in refuse(pack_tar([]))


def test_scripts_near_the_top_come_first() -> None:
    paths = ("b/c/x.py", "train.py", "data.bin", "b/y.py", "a.py")
    assert archives.list_scripts(paths, 3) == ["a.py", "train.py", "b/y.py"]
