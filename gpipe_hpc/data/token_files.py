"""Format detection for files of tokens: raw numbers, or numbers after a header with their dtype.

Known headers: NumPy's ``.npy``, the index (``.idx``) of Megatron-LM's ``.bin``, and the 256 int32
numbers of llm.c's ``.bin``. Sizes in a header are checked against the file size before anything is
read, and nothing is unpickled.
"""

import io
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.paths import unreadable
from gpipe_hpc.errors import DataError, UnfitDataError

_PEEKED_BYTES: Final = 2**14
_KINDS: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")

# Magic bytes of formats that are not raw numbers. They have at least 4 bytes: a file of tokens
# starts with one of them by chance once in billions.
_OTHERS: Final[Mapping[bytes, str]] = MappingProxyType(
    {
        b"PK\x03\x04": "a zip archive (.npz, .pt)",
        b"\x1f\x8b\x08\x00": "gzip-compressed",
        b"\x28\xb5\x2f\xfd": "zstd-compressed",
        b"PAR1": "a Parquet file",
        b"ARROW1": "an Arrow file",
        b"\x89HDF\r\n": "an HDF5 file",
        b"TNTIDX\x00\x00": "an index in fairseq's old format",
    }
)
_NPY: Final = b"\x93NUMPY"
MEGATRON: Final = b"MMIDIDX\x00\x00"
# Megatron-LM's megatron/core/datasets/indexed_dataset.py: class DType.
_MEGATRON_KINDS: Final[Mapping[int, str]] = MappingProxyType(
    {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
)
_MEGATRON_HEADER: Final = struct.Struct("<9sQBQQ")
# llm.c's dev/data: (magic number, version) -> kind, in a header of 256 int32.
_LLMC_KINDS: Final[Mapping[tuple[int, int], str]] = MappingProxyType(
    {(20240520, 1): "uint16", (20240801, 7): "uint32"}
)
_LLMC_BYTES: Final = 1024


@dataclass(frozen=True)
class TokenFile:
    """A file with `num_tokens` integers of dtype `kind`, starting at byte `offset`.

    `name` identifies the file on all machines.
    """

    path: Path
    name: str
    kind: str
    num_tokens: int
    offset: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the little-endian NumPy dtype of the tokens."""
        return np.dtype(self.kind).newbyteorder("<")


class _Peek(NamedTuple):
    """The first bytes of a file, and its size."""

    head: bytes
    num_bytes: int


def open_token_file(path: Path, name: str, kind: str) -> TokenFile:
    """Detect the format of a file of tokens; `kind` (data.dtype) is used if it has no header.

    Raises DataError if the file is unreadable, empty or damaged, ends inside a token, has an
    unsupported format, or if its raw numbers are implausible for this dtype.
    """
    peek = _peek(path)
    if not peek.num_bytes:
        raise empty(path)
    for start, what in _OTHERS.items():
        if peek.head.startswith(start):
            raise UnfitDataError(
                f"data: {path} is {what} (it starts with {start!r}), not raw tokens, NumPy's .npy, "
                f"or Megatron-LM's .bin with .idx; unpack or convert it"
            )
    if peek.head.startswith(_NPY):
        return _open_npy(path, name, peek)
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and _is_index(index):
        return _open_megatron(path, name, index, peek.num_bytes)
    llmc = _llmc_kind(peek.head)
    if llmc is not None:
        return _open_llmc(path, name, peek, llmc)
    size = np.dtype(kind).itemsize
    if peek.num_bytes % size:
        raise UnfitDataError(
            f"data: {path} ends inside a token: expected a multiple of {size} bytes, got "
            f"{peek.num_bytes}; check data.dtype"
        )
    file = TokenFile(path, name, kind, peek.num_bytes // size)
    _refuse_misfit(file, peek.head)
    return file


def refuse_array(path: Path) -> None:
    """Raise DataError if a file of text is a NumPy file, whose header would be read as text.

    All other files are accepted as bytes.
    """
    head = _peek(path).head
    if head.startswith(_NPY) or (path.suffix == ".npz" and head.startswith(b"PK\x03\x04")):
        raise UnfitDataError(
            f"data: {path} is a NumPy file (it starts with {head[:6]!r}), not text; "
            f"read tokens with data=tokens, and arrays with data=arrays "
            f"data.inputs={path}"
        )


def whole_file(path: Path, name: str) -> TokenFile:
    """Return a file of any format as uint8 tokens; raise DataError if it cannot be read."""
    try:
        num_bytes = path.stat().st_size
        if not os.access(path, os.R_OK):
            raise PermissionError(f"no permission to read {path}")
    except OSError as error:
        raise unreadable(path, error) from error
    return TokenFile(path, name, "uint8", num_bytes)


def empty(path: Path) -> DataError:
    """Return the error for a file without tokens."""
    return UnfitDataError(f"data: {path} is empty (0 bytes, no tokens); remove it from data.paths")


def without_indices(paths: Sequence[Path]) -> list[Path]:
    """Replace each Megatron-LM .idx path by its .bin path and remove duplicates."""
    chosen = (path.with_suffix(".bin") if _is_index(path) else path for path in paths)
    return list(dict.fromkeys(chosen))


def _is_index(path: Path) -> bool:
    return path.suffix == ".idx" and path.is_file() and _peek(path).head.startswith(MEGATRON)


def _peek(path: Path) -> _Peek:
    try:
        with path.open("rb") as file:
            return _Peek(file.read(_PEEKED_BYTES), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def _open_npy(path: Path, name: str, peek: _Peek) -> TokenFile:
    """Parse the .npy header in the first bytes of the file, and return the described token file.

    Only the bytes in `peek` are parsed, so that a wrong header length cannot cause a large read.
    """
    stream = io.BytesIO(peek.head)
    try:
        version = np.lib.format.read_magic(stream)
        read: Any = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_columns, dtype = read(stream)
    except (ValueError, KeyError, EOFError, SyntaxError) as error:
        raise _damaged(path, "a NumPy header", f"{type(error).__name__}: {error}") from error
    # uint64 is read as int64, which has the same bits for all valid tokens.
    kind = "int64" if dtype == np.dtype("<u8") else dtype.name
    if kind not in _KINDS or dtype.newbyteorder("<") != dtype or (by_columns and len(shape) > 1):
        raise UnfitDataError(
            f"data: {path} does not contain tokens: expected little-endian integers in C order, "
            f"got {dtype.str}{list(shape)}{' in Fortran order' * by_columns}; save it again with "
            f"np.save(path, tokens.astype('uint16'))"
        )
    return _within(TokenFile(path, name, kind, math.prod(shape), stream.tell()), peek.num_bytes)


def _open_megatron(path: Path, name: str, index: Path, num_bytes: int) -> TokenFile:
    """Return the token file described by Megatron-LM's index, whose sequences are contiguous."""
    try:
        with index.open("rb") as file:
            return TokenFile(path, name, *_megatron_facts(file, index, path, num_bytes))
    except OSError as error:
        raise unreadable(index, error) from error


def _megatron_facts(file: BinaryIO, index: Path, path: Path, num_bytes: int) -> tuple[str, int]:
    """Return dtype and number of tokens from an index; raise DataError if it is inconsistent."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size:
        raise _damaged(index, f"a header of {_MEGATRON_HEADER.size} bytes", f"{len(head)}")
    _, version, code, num_sequences, num_documents = _MEGATRON_HEADER.unpack(head)
    kind = _MEGATRON_KINDS.get(code)
    if version != 1 or kind is None:
        got = f"version {version}, dtype code {code}"
        raise _damaged(index, "version 1 and an integer dtype", got)
    # Lengths, pointers, documents and, for multimodal data, modes.
    wanted = len(head) + 12 * num_sequences + 8 * num_documents
    if size not in (wanted, wanted + num_sequences):
        raise _damaged(index, f"{wanted} bytes for {num_sequences} sequences", f"{size} bytes")
    itemsize = np.dtype(kind).itemsize
    total = 0
    for first in range(0, num_sequences, _BLOCK):
        count = min(_BLOCK, num_sequences - first)
        lengths = _numbers(file, len(head) + 4 * first, count, "<i4").astype(np.int64)
        pointers = _numbers(file, len(head) + 4 * num_sequences + 8 * first, count, "<i8")
        starts = itemsize * (total + np.cumsum(lengths) - lengths)
        if (lengths < 0).any() or (pointers != starts).any():
            raise _damaged(index, "contiguous sequences", "gaps or overlaps")
        total += int(lengths.sum())
    if total * itemsize != num_bytes:
        raise _damaged(path, f"{total * itemsize} bytes according to {index.name}", f"{num_bytes}")
    return kind, total


_BLOCK: Final = 2**20  # sequences of an index checked at a time


def _numbers(file: BinaryIO, offset: int, count: int, kind: str) -> npt.NDArray[Any]:
    file.seek(offset)
    return np.frombuffer(file.read(count * np.dtype(kind).itemsize), kind)


def _llmc_kind(head: bytes) -> str | None:
    if len(head) < _LLMC_BYTES:
        return None
    magic, version = struct.unpack_from("<ii", head)
    return _LLMC_KINDS.get((magic, version))


def _open_llmc(path: Path, name: str, peek: _Peek, kind: str) -> TokenFile:
    (num_tokens,) = struct.unpack_from("<i", peek.head, 8)
    if num_tokens < 0:
        raise _damaged(path, "a number of tokens in llm.c's header", str(num_tokens))
    return _within(TokenFile(path, name, kind, num_tokens, _LLMC_BYTES), peek.num_bytes)


def _within(file: TokenFile, num_bytes: int) -> TokenFile:
    wanted = file.offset + file.num_tokens * file.dtype.itemsize
    if file.num_tokens < 0 or wanted > num_bytes:
        raise _damaged(file.path, f"{wanted} bytes according to its header", f"{num_bytes}")
    return file


def _damaged(path: Path, expected: str, got: str) -> DataError:
    return DataError(f"data: {path} is damaged: expected {expected}, got {got}; create it again")


_FEWEST: Final = 64  # pairs of numbers that the check needs
_TINY: Final = 16  # upper halves of 32-bit tokens are below this, as tokens are below 2**20
_TEXT: Final = np.zeros(256, np.bool_)
_TEXT[[9, 10, 13, *range(32, 127)]] = True


def _refuse_misfit(file: TokenFile, head: bytes) -> None:
    """Raise UnfitDataError if raw numbers clearly have another dtype than data.dtype.

    Read as 16 bits, each 32-bit number becomes two, the second of which is almost always 0: a model
    would learn that every other token is 0. Pairs of letters look like valid 16-bit tokens.
    """
    size = file.dtype.itemsize
    if size == 1 or len(head) < 2 * _FEWEST * size:
        return
    sample = np.frombuffer(head, file.dtype, len(head) // (2 * size) * 2)
    lower, upper = np.abs(sample[0::2].astype(np.int64)), np.abs(sample[1::2].astype(np.int64))
    large = 1 if not upper.any() else 256
    looks = None
    if upper.max() < _TINY and (lower >= large).mean() > 0.25:
        looks = f"every second number is below {_TINY}, as in tokens of {16 * size} bits"
    elif _TEXT[np.frombuffer(head, np.uint8)].all():
        looks = "all bytes are printable characters, as in text"
    if looks is not None:
        raise UnfitDataError(
            f"data: {file.path} does not look like tokens of data.dtype={file.kind}: {looks}; "
            f"read as {8 * size}-bit numbers it starts with {sample[:6].tolist()}; set data.dtype "
            f"to the type in the file, or data=text, or save it as .npy, which states its type"
        )
