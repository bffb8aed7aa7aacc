"""Index files that later runs reuse: a JSON header, then arrays that are memory-mapped.

An index is written to a temporary file and renamed, so several jobs may write the same index. Its
header contains the names, sizes and modification times of the indexed files and the settings; if
these differ, or if the hash of the content is wrong, the data is indexed again. Nothing is
unpickled.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.indexing.parts import KINDS, IndexPart
from gpipe_hpc.small_files import MOST_BYTES, open_regular, parse_json

log = logging.getLogger("gpipe_hpc.train")

FOLDER: Final = ".gpipe_hpc"
"""Name of the folder of indices next to the data."""
_MAGIC: Final = b"gpipe_hpc index\n"
_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 64
_START_BYTES: Final = len(_MAGIC) + _LENGTH.size + hashlib.blake2b().digest_size
_BLOCK: Final = 2**24
_RECENT_S: Final = 2.0


class IndexFile(NamedTuple):
    """Location of an index file, and the key that the header of a valid index contains."""

    folders: tuple[Path, ...]  # candidates, in order of preference
    name: str
    key: str  # hash of settings, file names, sizes and times
    is_settled: bool  # False if a file changed so recently that its time may not change again


def place_of(
    kind: str,
    sources: Sequence[Path],
    settings: Mapping[str, Any],
    folders: Sequence[Path],
) -> IndexFile:
    """Return location and key of the index of files or folders; raise OSError if one is missing.

    File names are relative to the folder of the first source, so that data can be moved with its
    index.
    """
    root = sources[0].absolute().parent
    names = [os.path.relpath(path.absolute(), root) for path in sources]
    states = [path.stat() for path in sources]
    about = json.dumps([kind, dict(settings), names])
    times = [[state.st_size, state.st_mtime_ns] for state in states]
    newest_s = max(state.st_mtime for state in states)
    return IndexFile(
        tuple(folders),
        f"{kind}-{_hash(about)}.index",
        _hash(about + json.dumps(times)),
        abs(time.time() - newest_s) > _RECENT_S,
    )


def load(
    place: IndexFile, is_fresh: Callable[[IndexPart], bool] = lambda _: True
) -> IndexPart | None:
    """Load the index if it exists, is undamaged and matches the current files; else return None.

    `is_fresh` is an additional check of the loaded index.
    """
    for folder in place.folders:
        path = folder / place.name
        try:
            part = _read(path, place.key)
            if part is None or not is_fresh(part):
                continue
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("data: the index %s is damaged (%s) and is rebuilt", path, error)
            continue
        log.info("loaded the index of the data from %s", path)
        return part
    return None


def save(place: IndexFile, part: IndexPart) -> Path | None:
    """Write an index; return its path, or None if it was not written."""
    if not place.is_settled:
        return None
    refusals = []
    for folder in place.folders:
        path = folder / place.name
        aside = path.with_name(f"{place.name}.{socket.gethostname()}.{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(aside, place.key, part)
            os.replace(aside, path)
        except OSError as error:
            refusals.append(str(error))
            with contextlib.suppress(OSError):
                aside.unlink()
            continue
        log.info("saved the index of the data as %s", path)
        return path
    log.warning(
        "data: the index cannot be saved (%s); set data.index_dir, otherwise each rank and each "
        "run indexes the data again",
        "; ".join(refusals),
    )
    return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _write(path: Path, key: str, part: IndexPart) -> None:
    offset, listing = 0, []
    contents: list[bytes] = []
    for name, array in part.arrays.items():
        content = np.ascontiguousarray(array)
        assert content.dtype.str in KINDS, f"{name} is {content.dtype}"
        listing.append([name, content.dtype.str, list(content.shape), offset])
        padding = bytes(-content.nbytes % _ALIGNMENT)
        contents += [content.tobytes(), padding]
        offset += content.nbytes + len(padding)
    head = json.dumps({"key": key, "arrays": listing, "facts": part.facts}).encode()
    head += b" " * (-(_START_BYTES + len(head)) % _ALIGNMENT)
    digest = hashlib.blake2b(head)
    for each in contents:
        digest.update(each)
    with path.open("wb") as file:
        for each in (_MAGIC, _LENGTH.pack(len(head)), digest.digest(), head, *contents):
            file.write(each)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, key: str) -> IndexPart | None:
    """Read an index; return None if its key differs, raise ValueError if it is damaged."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        start = file.read(_START_BYTES)
        if len(start) < _START_BYTES or not start.startswith(_MAGIC):
            raise ValueError("not an index file of gpipe_hpc")
        (length,) = _LENGTH.unpack_from(start, len(_MAGIC))
        if length > min(num_bytes - _START_BYTES, MOST_BYTES):
            raise ValueError("truncated header")
        content = file.read(length)
        head = parse_json(content)
        if head["key"] != key:
            return None
        digest = hashlib.blake2b(content)
        while block := file.read(_BLOCK):
            digest.update(block)
        if digest.digest() != start[-digest.digest_size :]:
            raise ValueError("wrong hash of the content")
    first = _START_BYTES + length
    mapped = np.memmap(path, np.uint8, "r") if num_bytes > first else np.empty(0, np.uint8)
    arrays = {
        name: _array(mapped, kind, shape, first + offset, num_bytes)
        for name, kind, shape, offset in head["arrays"]
    }
    return IndexPart(arrays, head["facts"])


def _array(
    mapped: npt.NDArray[np.uint8], kind: str, shape: Sequence[int], start: int, num_bytes: int
) -> npt.NDArray[Any]:
    if kind not in KINDS or min(shape, default=0) < 0:
        raise ValueError(f"unsupported array {kind}{shape}")
    stop = start + math.prod(shape) * np.dtype(kind).itemsize
    if not 0 <= start <= stop <= num_bytes:
        raise ValueError("array outside of the file")
    return mapped[start:stop].view(kind).reshape(shape)
