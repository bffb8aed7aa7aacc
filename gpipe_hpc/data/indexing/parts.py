"""Result of an indexing task: arrays and JSON values, transferred without pickle."""

import hashlib
import json
from collections.abc import Mapping
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
KINDS: Final = ("|u1", "<i4", "<i8")
"""Dtypes that arrays of an index may have."""


class IndexPart(NamedTuple):
    """Index of a part of the data: NumPy arrays by name, and JSON values by name (`facts`)."""

    arrays: Arrays
    facts: dict[str, Any]


def write_part(stream: IO[bytes], part: IndexPart) -> None:
    """Write a part as a line of JSON followed by the bytes of its arrays."""
    listing = [[name, each.dtype.str, each.shape] for name, each in part.arrays.items()]
    stream.write(json.dumps([listing, part.facts]).encode() + b"\n")
    for each in part.arrays.values():
        stream.write(np.ascontiguousarray(each).tobytes())
    stream.flush()


def read_part(stream: IO[bytes]) -> IndexPart:
    """Read a part; raise EOFError if the writing process has died."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError("no result received")
    listing, facts = json.loads(line)
    arrays = {}
    for name, kind, shape in listing:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        content = stream.read(num_bytes)
        if len(content) < num_bytes:
            raise EOFError("incomplete result received")
        arrays[name] = np.frombuffer(content, kind).reshape(shape)
    return IndexPart(arrays, facts)


def percentile(name: bytes) -> int:
    """Hash a name to an integer from 0 to 99, which assigns it to training or validation.

    The result is the first 8 bytes of the name's SHA-256, as a big-endian number, modulo 100. It
    depends on no other name, so adding a file never moves another file to a different split.
    """
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % 100
