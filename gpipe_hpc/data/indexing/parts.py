"""What one task of indexing gives: arrays, and facts that JSON can hold. Never pickled."""

import hashlib
import json
from collections.abc import Mapping
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
KINDS: Final = ("|u1", "<i4", "<i8")
"""The kinds of numbers that arrays of an index may have."""


class Part(NamedTuple):
    """What was found in a part of the data."""

    arrays: Arrays
    facts: dict[str, Any]


def write_part(stream: IO[bytes], part: Part) -> None:
    """Write a part: a line of JSON, and the bytes of the arrays one after the other."""
    listing = [[name, each.dtype.str, each.shape] for name, each in part.arrays.items()]
    stream.write(json.dumps([listing, part.facts]).encode() + b"\n")
    for each in part.arrays.values():
        stream.write(np.ascontiguousarray(each).tobytes())
    stream.flush()


def read_part(stream: IO[bytes]) -> Part:
    """Return a part; EOFError where the other end has died."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError("nothing came")
    listing, facts = json.loads(line)
    arrays = {}
    for name, kind, shape in listing:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        content = stream.read(num_bytes)
        if len(content) < num_bytes:
            raise EOFError("too little came")
        arrays[name] = np.frombuffer(content, kind).reshape(shape)
    return Part(arrays, facts)


def percentile(name: bytes) -> int:
    """Return 0 to 99 for a name: which percent it belongs to, whatever else there is.

    The first 8 bytes of its SHA-256, big-endian, modulo 100. What is kept for validation is told
    apart by it: adding a file never moves another one.
    """
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % 100
