"""Tests of the tar reader, which finds the same members as tarfile but limits memory."""

import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from gpipe_hpc.data.indexing.tar import TarDamageError, _BufferedFile, members, scan_tar

NAMES = ["a.jpg", "d/" + "x" * 90 + "/" + "y" * 60 + ".jpg", "ü/é.png", "z" * 99, "q/" * 40 + "f"]
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


def found(path: Path) -> list[tuple[str, int, int]]:
    with _BufferedFile(path) as file:
        return [(each.name, each.offset, each.num_bytes) for each in members(file)]


@pytest.mark.parametrize("form", FORMS)
def test_members_are_those_that_the_library_finds(tmp_path, form):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=FORMS[form]) as tar:
        for number, name in enumerate(NAMES + ["k" * 300 + ".cls"] * (form != "ustar")):
            add(tar, name, b"x" * (number * 500))
        add(tar, "folder", type=tarfile.DIRTYPE)
        add(tar, "old/", type=tarfile.AREGTYPE)
        add(tar, "link.jpg", type=tarfile.SYMTYPE, linkname="l" * 90)
        add(tar, "hard.jpg", type=tarfile.LNKTYPE, linkname="a.jpg")
        add(tar, "pipe.jpg", type=tarfile.FIFOTYPE)
        if form == "pax":
            add(tar, "of.jpg", b"abc", pax_headers={"comment": "x" * 1000, "mtime": "1.5"})
        add(tar, "last.jpg", b"abc")
    with tarfile.open(path) as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar if each.isreg()]
    assert found(path) == expected and len(expected) > 5


def test_size_in_binary_is_read(tmp_path):
    """Sizes of files beyond 8 GB are stored in binary, here that of a small file."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        add(tar, "a.jpg", b"12345")
    content = bytearray(path.read_bytes())
    content[124:136] = b"\x80" + (5).to_bytes(11, "big")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)
    assert found(path) == [("a.jpg", 512, 5)]


def test_sum_of_signed_bytes_is_taken_too(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        add(tar, "ü.jpg", b"12345")
    content = bytearray(path.read_bytes())
    content[148:156] = b" " * 8
    signed = sum(byte - 256 * (byte > 127) for byte in content[:512])
    content[148:156] = b"%06o\0 " % signed
    path.write_bytes(content)
    assert found(path) == [("ü.jpg", 512, 5)]


def header(name: bytes, size: int, kind: bytes, magic: bytes = b"ustar\x0000") -> bytearray:
    block = bytearray(512)
    block[: len(name)] = name
    block[124:136] = b"%011o\0" % size
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return block


def pax(size: str) -> bytes:
    record = f" size={size}\n"
    length = len(record) + 2
    return f"{length}{record}".encode()


BOMBS = {
    # Files of about 4 KB whose headers claim 300 MB.
    "pax header": header(b"x", 300_000_000, b"x") + bytes(3000),
    "long name": header(b"././@LongLink", 300_000_000, b"L", b"ustar  \0") + bytes(3000),
    "long link": header(b"././@LongLink", 300_000_000, b"K", b"ustar  \0") + bytes(3000),
    "global header": header(b"g", 300_000_000, b"g") + bytes(3000),
    "file": header(b"1.jpg", 300_000_000, b"0") + bytes(3000),
    "label": header(b"1.cls", 300_000_000, b"0") + bytes(3000),
    "unknown kind": header(b"1.cls", 300_000_000, b"Z") + bytes(3000),
    "size by pax": header(b"x", len(pax("300000000")), b"x")
    + pax("300000000").ljust(512, b"\0")
    + header(b"1.cls", 1, b"0")
    + bytes(2000),
    "negative size by pax": header(b"x", len(pax("-1024")), b"x")
    + pax("-1024").ljust(512, b"\0")
    + header(b"1.cls", 1, b"0")
    + bytes(2000),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_size_beyond_the_file_allocates_nothing(tmp_path, bomb):
    """tarfile allocates the claimed 300 MB before the size can be checked."""
    path = tmp_path / "a.tar"
    path.write_bytes(BOMBS[bomb])
    tracemalloc.start()
    part = scan_tar(str(path), "label")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert [name for name, _ in part.facts["wrong"]] == [""]
    assert len(part.arrays["label"]) == 0


def test_header_longer_than_any_name_is_refused(tmp_path):
    """A long header is rejected without reading it, even if the file is large enough."""
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(header(b"././@LongLink", 2**33, b"L", b"ustar  \0"))
        file.truncate(2**34)
    tracemalloc.start()
    with pytest.raises(TarDamageError, match="8589934592 bytes at byte 512"):
        found(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_sparse_members_make_no_sample(tmp_path):
    """A few bytes of a sparse map may describe a file of any size."""
    size = 2**40
    record = f" GNU.sparse.realsize={size}\n"
    content = f"{len(record) + 2}{record}".encode()
    blocks = [
        header(b"x", len(content), b"x"),
        content.ljust(512, b"\0"),
        header(b"1.cls", 3, b"0"),
        b"1\n\n".ljust(512, b"\0"),
        header(b"1.jpg", 3, b"0"),
        b"jpg".ljust(512, b"\0"),
        bytes(1024),
    ]
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(blocks))
    part = scan_tar(str(path), "label")
    assert part.facts["wrong"] == [("1", "no class in 1.cls: 3 bytes, or sparse")]


@pytest.mark.parametrize("place", range(0, 2048, 100))
def test_any_damage_is_an_end_or_another_name_and_no_crash(tmp_path, place):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "ü" * 80 + ".jpg", b"x" * 100)
        add(tar, "ü" * 80 + ".cls", b"1")
    content = bytearray(path.read_bytes())
    for byte in (0, 9, 50, 255):
        content[place] = byte
        path.write_bytes(content)
        part = scan_tar(str(path), "label")
        assert len(part.arrays["label"]) + len(part.facts["wrong"]) <= 3
