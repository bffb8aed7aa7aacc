"""Digests of files in blocks: what tells a byte that changed, and where.

SHA-256 by OpenSSL releases Python's lock, and so does reading: threads work on several blocks at
once. A block is a fixed number of bytes, so that many ranks can share the work on one file.
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


class Block(NamedTuple):
    """Bytes of a file: from `start`, `size` of them."""

    path: Path
    start: int
    size: int


def blocks_of(path: Path, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> list[Block]:
    """Return a file's blocks; the last one may be shorter."""
    starts = range(0, num_bytes, block_bytes)
    return [Block(path, start, min(block_bytes, num_bytes - start)) for start in starts]


def digests(blocks: Sequence[Block]) -> list[str | OSError]:
    """Return each block's SHA-256 in hexadecimal, or why it cannot be read; in threads.

    A file that ends within a block gives the digest of what is there.
    """
    if len(blocks) < 2:
        return [_digest(block) for block in blocks]
    with ThreadPoolExecutor(min(_MOST_THREADS, _num_cores(), len(blocks))) as pool:
        return list(pool.map(_digest, blocks))


def _digest(block: Block) -> str | OSError:
    found = hashlib.sha256()
    # In pieces that stay in a core's cache between reading and hashing.
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
