"""JSON lines: where each document lies in a file, and how long its text is."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from gpipe_hpc.data.indexing.parts import Part, percentile

MOST_LINE_BYTES: Final = 2**28
"""A longer line is no document: a file of zeros without an end of line would fill the memory."""
_PIECE: Final = 2**20
_COLUMNS: Final = ("offset", "num_bytes", "text_bytes", "percentile")


def text_of(line: bytes, key: str) -> bytes:
    """Return the text of a document as UTF-8; raise ValueError where the line is none."""
    try:
        text = json.loads(line)[key]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no object with {key!r}") from error
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {type(text).__name__}, no text")
    encoded: bytes = text.encode()
    return encoded


def scan_lines(path: str, start: int, stop: int, key: str) -> Part:
    """Return the documents on lines that begin at bytes `start` to `stop` of a file.

    Arrays: offset and bytes of each line, bytes of its text, its percentile. Facts: how many lines
    begin there (`lines`), and which of them are corrupt (`wrong`: number from 0, what it is).
    """
    rows: list[int] = []
    wrong: list[tuple[int, str]] = []
    offset, lines = _read(Path(path), start, stop)
    for number, line in enumerate(lines):
        if line is None:
            wrong.append((number, f"more than {MOST_LINE_BYTES} bytes without an end of line"))
            break  # it was the last that begins here
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
    return Part(arrays, {"lines": len(lines), "wrong": wrong})


def _read(path: Path, start: int, stop: int) -> tuple[int, list[bytes | None]]:
    """Return where the first line begins, and the lines; None for a last one that is too long."""
    with path.open("rb", buffering=0) as file:
        # A line begins behind the end of another: from one byte before.
        first = max(0, start - 1)
        file.seek(first)
        content = _exactly(file, min(stop, os.fstat(file.fileno()).st_size) - first)
        begin = content.find(b"\n") + 1 if start else 0
        if (start and not begin) or begin == len(content):
            return stop, []
        # Split keeps no ends of lines: they are put back, as their bytes count.
        lines: list[bytes | None] = [line + b"\n" for line in content[begin:].split(b"\n")]
        last = lines.pop()
        if last != b"\n":
            assert last is not None, "only what is too long is None"
            lines.append(_completed(file, last[:-1]))
    return first + begin, lines


def _completed(file: Any, line: bytes) -> bytes | None:
    """Return a line that has begun, to its end; None if it is too long."""
    parts, num_bytes = [line], len(line)
    while num_bytes <= MOST_LINE_BYTES:
        piece = file.read(_PIECE)
        end = piece.find(b"\n") + 1
        parts.append(piece[:end] if end else piece)
        num_bytes += len(parts[-1])
        if end or not piece:
            return b"".join(parts) if num_bytes <= MOST_LINE_BYTES else None
    return None


def _exactly(file: Any, num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0 and (piece := file.read(num_bytes)):
        parts.append(piece)
        num_bytes -= len(piece)
    return b"".join(parts)


def read_line(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    """Return a line of which the index says where it is."""
    file.seek(offset)
    return file.read(num_bytes)
