"""Index of JSON Lines files: the position of each document and the length of its text."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from gpipe_hpc.data.indexing.parts import IndexPart, percentile

MOST_LINE_BYTES: Final = 2**28
"""Maximum length of a line; a file of zeros without a newline would otherwise fill the memory."""
_PIECE: Final = 2**20
_COLUMNS: Final = ("offset", "num_bytes", "text_bytes", "percentile")


def text_of(line: bytes, key: str) -> bytes:
    """Return the text of a document as UTF-8; raise ValueError if the line is not a document."""
    try:
        text = json.loads(line)[key]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no object with key {key!r}") from error
    if not isinstance(text, str):
        raise ValueError(f"{key!r} of type {type(text).__name__} instead of a string")
    encoded: bytes = text.encode()
    return encoded


def scan_lines(path: str, start: int, stop: int, key: str) -> IndexPart:
    """Index the documents on lines that begin at bytes `start` to `stop` of a file.

    Arrays: offset and size of each line, size of its text, hash percentile. Facts: the number of
    lines that begin in the range (`lines`), and corrupt lines (`wrong`: (line number from 0,
    error)).
    """
    rows: list[int] = []
    wrong: list[tuple[int, str]] = []
    offset, lines = _read(Path(path), start, stop)
    for number, line in enumerate(lines):
        if line is None:
            wrong.append((number, f"more than {MOST_LINE_BYTES} bytes without a newline"))
            break  # no other line begins in this range
        if not line.isspace():
            try:
                text = text_of(line, key)
                rows += (offset, len(line), len(text), percentile(text))
            except ValueError as error:
                wrong.append((number, str(error)))
        offset += len(line)
    table = np.array(rows, np.int64).reshape(-1, len(_COLUMNS))
    arrays: dict[str, Any] = dict(zip(_COLUMNS, table.T, strict=True))
    arrays["percentile"] = arrays["percentile"].astype(np.uint8)
    return IndexPart(arrays, {"lines": len(lines), "wrong": wrong})


def _read(path: Path, start: int, stop: int) -> tuple[int, list[bytes | None]]:
    """Return the lines that begin in a byte range, and the offset of the first.

    The last line is None if it is too long.
    """
    with path.open("rb", buffering=0) as file:
        # A line begins after a newline: start one byte earlier.
        first = max(0, start - 1)
        file.seek(first)
        content = _read_exactly(file, min(stop, os.fstat(file.fileno()).st_size) - first)
        begin = content.find(b"\n") + 1 if start else 0
        if (start and not begin) or begin == len(content):
            return stop, []
        # Restore the newlines that split() removes, as offsets include them.
        lines: list[bytes | None] = [line + b"\n" for line in content[begin:].split(b"\n")]
        last = lines.pop()
        if last != b"\n":
            assert last is not None, "lines within the block are not None"
            lines.append(_rest_of_line(file, last[:-1]))
    return first + begin, lines


def _rest_of_line(file: Any, line: bytes) -> bytes | None:
    """Read the rest of a line; return None if it is too long."""
    parts, num_bytes = [line], len(line)
    while num_bytes <= MOST_LINE_BYTES:
        piece = file.read(_PIECE)
        end = piece.find(b"\n") + 1
        parts.append(piece[:end] if end else piece)
        num_bytes += len(parts[-1])
        if end or not piece:
            return b"".join(parts) if num_bytes <= MOST_LINE_BYTES else None
    return None


def _read_exactly(file: Any, num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0 and (piece := file.read(num_bytes)):
        parts.append(piece)
        num_bytes -= len(piece)
    return b"".join(parts)


def read_line(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    """Return the line at an indexed position."""
    file.seek(offset)
    return file.read(num_bytes)
