"""Text from files: the Python standard library of this machine, or whatever paths are given."""

import os
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from gpipe_hpc.config import PythonSourceConfig, TextConfig, TokensConfig
from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data.corpus import Corpus, Segment, TextSource, TokenWindows
from gpipe_hpc.training.data.hashing import percentile
from gpipe_hpc.training.data.paths import expand, unreadable

# Tests would be more than half of the text; installed packages are not the same on all machines.
_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)

_MOST_PARTS: Final = 64  # of a file, each of which gives its end for validation
_WINDOWS_HELD: Final = 16  # at least, in each end: few of them span two


def open_python_source(config: PythonSourceConfig) -> TextSource:
    """Return the Python files of a folder, in order of their paths, split by file.

    A file belongs to validation if a hash of its relative path says so: adding a file never moves
    another one. Raises DataError if the folder has no Python files.
    """
    root = Path(config.root or sysconfig.get_path("stdlib"))
    files = sorted(_python_files(root))
    train: list[Segment] = []
    validation: list[Segment] = []
    for name in files:
        segment = _whole_file(root / name, name, itemsize=1)
        part = validation if percentile(name.encode()) < config.validation_percent else train
        part.append(segment)
    return _source(train, validation, "uint8", config.seq_len, config.vocab_size, str(root))


def open_text(config: TextConfig) -> TextSource:
    """Return the given files, in order of their names, as one text.

    Validation is `validation_paths`, or else a share of each file: the ends of equal parts of it,
    as many as leave each end with some windows. Folders are taken where tokens
    were asked for. Raises DataError for a pattern without files, a file that is missing, unreadable
    or empty, and one that ends inside a token.
    """
    suffix = ".bin" if isinstance(config, TokensConfig) else None
    itemsize = np.dtype(config.dtype).itemsize
    train = [_given_file(path, itemsize) for path in expand(config.paths, suffix)]
    if config.validation_paths:
        validation = [
            _given_file(path, itemsize) for path in expand(config.validation_paths, suffix)
        ]
    else:
        train, validation = _split_ends(train, config.validation_fraction, config.seq_len)
    what = ", ".join(config.paths)
    return _source(train, validation, config.dtype, config.seq_len, config.vocab_size, what)


def _python_files(root: Path) -> Iterable[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each not in _LEFT_OUT]
        for name in names:
            path = Path(folder, name)
            # A link may point to where the machine's owner keeps settings of his own.
            if name.endswith(".py") and not path.is_symlink():
                yield path.relative_to(root).as_posix()


def _given_file(path: Path, itemsize: int) -> Segment:
    segment = _whole_file(path, str(path), itemsize)
    if not segment.stop:
        raise DataError(f"data: {path} is empty, expected tokens, got 0 bytes; leave it out")
    return segment


def _whole_file(path: Path, name: str, itemsize: int) -> Segment:
    try:
        num_bytes = path.stat().st_size
        if not os.access(path, os.R_OK):
            raise PermissionError(f"no permission to read {path}")
    except OSError as error:
        raise unreadable(path, error) from error
    if num_bytes % itemsize:
        raise DataError(
            f"data: {path} ends inside a token, expected a multiple of {itemsize} bytes, got "
            f"{num_bytes}; check data.dtype"
        )
    return Segment(path, name, 0, num_bytes // itemsize)


def _split_ends(
    segments: Sequence[Segment], fraction: float, seq_len: int
) -> tuple[list[Segment], list[Segment]]:
    """Hold back the ends of equal parts of each file: its own end may be unlike the rest."""
    train, validation = [], []
    for each in segments:
        num_parts = round(each.stop * fraction) // (_WINDOWS_HELD * seq_len)
        num_parts = max(1, min(_MOST_PARTS, num_parts))
        edges = [each.stop * part // num_parts for part in range(num_parts + 1)]
        for start, stop in pairwise(edges):
            middle = stop - round((stop - start) * fraction)
            train.append(each._replace(start=start, stop=middle))
            validation.append(each._replace(start=middle, stop=stop))
    return train, validation


def _source(
    train: Sequence[Segment],
    validation: Sequence[Segment],
    dtype: str,
    seq_len: int,
    vocab_size: int,
    what: str,
) -> TextSource:
    source = TextSource(
        TokenWindows(Corpus(train, dtype), seq_len, vocab_size),
        TokenWindows(Corpus(validation, dtype), seq_len, vocab_size),
    )
    if not source.train.num_samples:
        raise DataError(
            f"data: too little text in {what}, expected more than data.seq_len={seq_len} tokens to "
            f"train on, got {source.train.corpus.num_tokens}; give more text or lower data.seq_len"
        )
    return source
