"""Index of tar files of images and labels, built by reading only headers and labels.

Python's tarfile reads as many bytes as a header claims before it checks the file size: a file of 4
KB allocated 300 MB. This reader raises an error if a header claims more than the file contains, or
a name longer than any file system allows. Formats: ustar, GNU long names, pax `path` and `size`
(POSIX.1-2001, pax, "ustar Interchange Format" and "pax Header Block").
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from gpipe_hpc.data.indexing.parts import Arrays, IndexPart

IMAGE_SUFFIXES: Final = (".jpg", ".jpeg", ".png")
_BLOCK: Final = 512
_WINDOW: Final = 4096
_MOST_NAME_BYTES: Final = 2**16
_MOST_LABEL_BYTES: Final = 2**20
_REGULAR: Final = (b"0", b"\0", b"7", b"S")
# Links, devices, folders and pipes have no content, whatever size their header gives.
_EMPTY: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX, _SUN_PAX = b"L", b"K", b"x", b"g", b"X"


class TarDamageError(Exception):
    """A tar file is damaged."""


class TarMember(NamedTuple):
    """A regular file in a tar file."""

    name: str
    offset: int
    num_bytes: int
    is_sparse: bool


@dataclass
class _TarSample:
    """The tar members of one sample, keyed by the suffix after the first dot of their name."""

    name: str
    members: dict[str, TarMember] = field(default_factory=dict)


class _UnusableError(Exception):
    """A group of tar members is not a valid sample."""


class _TarEntry(NamedTuple):
    name: str
    offset: int
    num_bytes: int
    label: int


class _BufferedFile:
    """An open file of known length with a small read-ahead buffer."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        self._start, self._window = 0, b""

    def __enter__(self) -> "_BufferedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def part(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes at `offset`; raise TarDamageError if the file ends before."""
        if offset + num_bytes > self.num_bytes:
            raise TarDamageError(
                f"needs {num_bytes} bytes at offset {offset}, but the file has {self.num_bytes}"
            )
        if not self._start <= offset <= offset + num_bytes <= self._start + len(self._window):
            self._window = os.pread(self._file.fileno(), max(num_bytes, _WINDOW), offset)
            self._start = offset
        begin = offset - self._start
        return self._window[begin : begin + num_bytes]


def scan_tar(path: str, label_key: str) -> IndexPart:
    """Index the samples of a tar file: consecutive members with equal names up to the first dot.

    Arrays: names (as `text` and their `ends` in it), offset and size of the image, label. Facts:
    `wrong`, a list of (sample name, error) pairs; the name is "" for the rest of a damaged file.
    """
    entries: list[_TarEntry] = []
    wrong: list[tuple[str, str]] = []
    with _BufferedFile(Path(path)) as file:
        try:
            for group in _groups(members(file)):
                try:
                    entries += _entry(file, group, label_key)
                except _UnusableError as error:
                    wrong.append((group.name, str(error)))
        except TarDamageError as error:
            wrong.append(("", str(error)))
    encoded = [each.name.encode("utf-8", "surrogateescape") for each in entries]
    numbers = np.array([each[1:] for each in entries], np.int64).reshape(-1, 3)
    arrays: Arrays = {
        "text": np.frombuffer(b"".join(encoded), np.uint8),
        "ends": np.cumsum([len(each) for each in encoded], dtype=np.int64),
        "offset": numbers[:, 0],
        "num_bytes": numbers[:, 1],
        "label": numbers[:, 2],
    }
    return IndexPart(arrays, {"wrong": wrong})


def members(file: _BufferedFile) -> Iterator[TarMember]:
    """Yield the regular files in a tar file; raise TarDamageError if the archive is damaged."""
    offset, said = 0, dict[str, str]()
    while True:
        if offset + _BLOCK > file.num_bytes:
            raise TarDamageError(f"no header or end of archive at byte {offset}")
        header = file.part(offset, _BLOCK)
        if header == bytes(_BLOCK):
            return
        kind, size = header[156:157], _size(header, offset)
        offset += _BLOCK
        if kind in (_LONG_NAME, _PAX, _SUN_PAX, _LONG_LINK, _GLOBAL_PAX):
            said |= _words(file, kind, offset, size)
            offset += _padded(size)
            continue
        size = _number(said.get("size", str(size)), offset)
        name = said.get("GNU.sparse.name") or said.get("path") or _name(header)
        if kind in _EMPTY or (kind == b"\0" and name.endswith("/")):
            size = 0
        if offset + size > file.num_bytes:
            raise TarDamageError(
                f"{name[:200]} needs {size} bytes at offset {offset}, but the file has "
                f"{file.num_bytes}"
            )
        if kind in _REGULAR and not name.endswith("/"):
            is_sparse = kind == b"S" or any(key.startswith("GNU.sparse") for key in said)
            yield TarMember(name, offset, size, is_sparse)
        if kind == b"S":
            size += _extended(file, header, offset)
        offset, said = offset + _padded(size), {}


def _extended(file: _BufferedFile, header: bytes, offset: int) -> int:
    """Return the number of bytes of the extension headers of an old GNU sparse file."""
    extended, num_bytes = header[482:483] not in (b"\0", b"0"), 0
    while extended:
        block = file.part(offset + num_bytes, _BLOCK)
        extended, num_bytes = block[504:505] not in (b"\0", b"0"), num_bytes + _BLOCK
    return num_bytes


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _size(header: bytes, offset: int) -> int:
    """Return the size in a header; raise TarDamageError if the header's checksum is wrong."""
    rest, said = header[:148] + b" " * 8 + header[156:], _octal(header[148:156])
    # Old programs compute the checksum of signed bytes.
    if said != sum(rest) and said != sum(byte - 256 * (byte > 127) for byte in rest):
        raise TarDamageError(f"no header or end of archive at byte {offset}")
    size = _octal(header[124:136])
    if size is None or size < 0:
        raise TarDamageError(f"no size in the header at byte {offset}")
    return size


def _octal(digits: bytes) -> int | None:
    """Decode a number of a header: octal digits, or base-256 after a first byte of 128 or 255."""
    if digits[0] == 128:
        return int.from_bytes(digits[1:], "big")
    if digits[0] == 255:
        return int.from_bytes(digits, "big", signed=True)
    text = digits.partition(b"\0")[0].strip()
    if text.strip(b"01234567"):
        return None
    return int(text or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # Only ustar has a prefix; GNU's format stores other fields in these bytes.
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    whole = prefix + b"/" + name if prefix else name
    return whole.decode("utf-8", "surrogateescape")


def _words(file: _BufferedFile, kind: bytes, offset: int, size: int) -> dict[str, str]:
    """Return the fields of an extended header, such as `path` and `size`, for the next member."""
    if offset + size > file.num_bytes:
        raise TarDamageError(f"a header of {size} bytes at byte {offset} exceeds the file")
    if kind in (_LONG_LINK, _GLOBAL_PAX):
        return {}
    if size > _MOST_NAME_BYTES:
        raise TarDamageError(
            f"a header of {size} bytes at byte {offset} exceeds the limit of {_MOST_NAME_BYTES}"
        )
    content = file.part(offset, size)
    if kind == _LONG_NAME:
        return {"path": content.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    words = {}
    while content.strip(b"\0"):
        length, space, rest = content.partition(b" ")
        if not (space and length.isdigit() and len(length) < 20):
            raise TarDamageError(f"no pax header at byte {offset}")
        record, content = rest[: int(length) - len(length) - 1], content[int(length) :]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not (equals and record.endswith(b"\n")):
            raise TarDamageError(f"no pax header at byte {offset}")
        words[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
    return words


def _number(text: str, offset: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise TarDamageError(f"no size in the header before byte {offset}: {text[:40]!r}")
    return int(text)


def _groups(found: Iterable[TarMember]) -> Iterator[_TarSample]:
    """Group consecutive members whose names are equal up to the first dot of the file name."""
    group = _TarSample("")
    for member in found:
        folder, slash, last = member.name.rpartition("/")
        stem, dot, suffix = last.partition(".")
        if (name := folder + slash + stem) != group.name:
            yield group
            group = _TarSample(name)
        group.members.setdefault(dot + suffix.lower(), member)
    yield group


def _entry(file: _BufferedFile, group: _TarSample, label_key: str) -> list[_TarEntry]:
    """Return the sample of a group as a list, empty if it has neither image nor class."""
    images = [member for suffix, member in group.members.items() if suffix in IMAGE_SUFFIXES]
    if not images and ".cls" not in group.members:
        return []
    if len(images) != 1:
        raise _UnusableError(f"{len(images)} images instead of one ({', '.join(group.members)})")
    (image,) = images
    if image.is_sparse:
        raise _UnusableError("a sparse file")
    return [_TarEntry(group.name, image.offset, image.num_bytes, _label(file, group, label_key))]


def _label(file: _BufferedFile, group: _TarSample, label_key: str) -> int:
    is_bare = ".cls" in group.members
    member = group.members.get(".cls" if is_bare else ".json")
    if member is None:
        raise _UnusableError(f"no class ({', '.join(group.members)})")
    if member.is_sparse or member.num_bytes > _MOST_LABEL_BYTES:
        raise _UnusableError(f"no class in {member.name}: {member.num_bytes} bytes, or sparse")
    text = file.part(member.offset, member.num_bytes)
    try:
        label = json.loads(text)
        label = label if is_bare else label[label_key]
    except (ValueError, KeyError, TypeError, RecursionError):
        label = None
    if type(label) is not int or not -(2**63) <= label < 2**63:
        shown = text[:40].decode("utf-8", "backslashreplace")
        raise _UnusableError(f"no class in {member.name}: {shown!r}")
    return label
