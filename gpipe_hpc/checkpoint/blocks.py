"""SHA-256 digests of blocks of files, which locate changed bytes.

OpenSSL's SHA-256 and reading release the GIL, so threads process several blocks in parallel. Blocks
have a fixed size, so that many ranks can share the work on one file.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

BLOCK_BYTES: Final = 16 * 2**20
_PIECE_BYTES: Final = 2**18
_MOST_THREADS: Final = 4


class FileBlock(NamedTuple):
    """A range of `size` bytes of a file from `start` on."""

    path: Path
    start: int
    size: int


def blocks_of(path: Path, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> list[FileBlock]:
    """Return a file's blocks; the last one may be shorter."""
    starts = range(0, num_bytes, block_bytes)
    return [FileBlock(path, start, min(block_bytes, num_bytes - start)) for start in starts]


def digests(blocks: Sequence[FileBlock]) -> list[str | OSError]:
    """Return each block's SHA-256 in hexadecimal, or its OSError, computed in threads.

    If a file ends within a block, the digest is that of the existing bytes.
    """
    if len(blocks) < 2:
        return [_digest(block) for block in blocks]
    with ThreadPoolExecutor(min(_MOST_THREADS, _num_cores(), len(blocks))) as pool:
        return list(pool.map(_digest, blocks))


def _digest(block: FileBlock) -> str | OSError:
    found = hashlib.sha256()
    # Read pieces that fit in a core's cache until they are hashed.
    piece = memoryview(bytearray(min(_PIECE_BYTES, block.size)))
    left = block.size
    try:
        with open(block.path, "rb", buffering=0) as file:
            file.seek(block.start)
            while left and (count := file.readinto(piece[: min(left, len(piece))])):
                found.update(piece[:count])
                left -= count
    except OSError as error:
        return error
    return found.hexdigest()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
