"""Data from files of text or tokens, and from the source files of the Python standard library."""

import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

from gpipe_hpc.data.corpus import Corpus, Segment, TextSource, TokenWindows, about_text
from gpipe_hpc.data.indexing.parts import percentile
from gpipe_hpc.data.mapped import MappedFiles
from gpipe_hpc.data.paths import expand
from gpipe_hpc.data.token_files import (
    TokenFile,
    empty,
    open_token_file,
    refuse_array,
    whole_file,
    without_indices,
)
from gpipe_hpc.errors import UnfitDataError
from gpipe_hpc.settings import Choices, Level, Range, TokenDataConfig, refuse

_DTYPES: Final = Choices("uint8", "uint16", "int16", "uint32", "int32", "int64")


@dataclass
class PythonSourceConfig(TokenDataConfig):
    """Settings for the Python files of a folder, with bytes as tokens."""

    root: Annotated[str | None, Level.EVERYDAY] = None
    """Folder of *.py files. null: the standard library of this Python, without its tests."""

    validation_percent: Annotated[int, Range(0, 99), Level.EVERYDAY] = 10
    """Percentage of files for validation, chosen by a hash of their path."""

    @property
    def holds_bytes(self) -> bool:
        """Return whether tokens are bytes of text: always True."""
        return True

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if self.vocab_size < 256:
            raise refuse(
                "data.vocab_size", "256 or more for bytes", self.vocab_size, "leave it at 256"
            )

    def open(self, seed: int, spare: Path | None) -> TextSource:
        """Open the files with `open_python_source`."""
        return open_python_source(self)


@dataclass
class TextConfig(TokenDataConfig):
    """Settings for files of text or of token numbers."""

    paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files or patterns, for example [corpus/*.txt]; data=tokens also accepts folders. The files
    are read as one text in the order of their names."""

    validation_paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files or patterns for validation. []: the ends of up to 64 equal parts of
    each file of paths."""

    validation_fraction: Annotated[float, Level.EVERYDAY] = 0.05
    """Fraction of each file for validation, if validation_paths is empty."""

    dtype: Annotated[str, _DTYPES, Level.EVERYDAY] = "uint8"
    """Type of a token in files without a header (little-endian)."""

    @property
    def holds_bytes(self) -> bool:
        """Return whether tokens are bytes of text."""
        return self.dtype == "uint8"

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if not self.paths:
            raise refuse("data.paths", "files or patterns", [], "as data.paths=[corpus/*]")
        if not 0 <= self.validation_fraction < 1:
            raise refuse(
                "data.validation_fraction",
                "0 <= fraction < 1",
                self.validation_fraction,
                "lower it",
            )

    def open(self, seed: int, spare: Path | None) -> TextSource:
        """Open the files with `open_text`."""
        return open_text(self)


@dataclass
class TokensConfig(TextConfig):
    """Settings for files of token numbers written by a tokenizer."""

    dtype: str = "uint16"
    seq_len: int = field(default=1024, kw_only=True)
    vocab_size: int = field(default=50257, kw_only=True)

    @property
    def holds_bytes(self) -> bool:
        """Return whether tokens are bytes of text: always False."""
        return False


# Tests would be more than half of the text; installed packages differ between machines.
_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)

_NUM_OPENED: Final = 16  # files opened at a time
_MOST_PARTS: Final = 64  # parts of a file, the end of each of which is for validation
_WINDOWS_HELD: Final = 16  # minimum windows in each end, so that few windows span two ends


def open_python_source(config: PythonSourceConfig) -> TextSource:
    """Open the Python files of a folder, in the order of their paths, as text.

    A hash of the relative path assigns each file to training or validation, so that adding a file
    never moves another. Raises DataError if the folder has no Python files.
    """
    root = Path(config.root or sysconfig.get_path("stdlib"))
    files = sorted(_python_files(root))
    train: list[Segment] = []
    validation: list[Segment] = []
    for name in files:
        segment = _all_of(whole_file(root / name, name))
        part = validation if percentile(name.encode()) < config.validation_percent else train
        part.append(segment)
    return _source(train, validation, config.seq_len, config.vocab_size, str(root))


def open_text(config: TextConfig) -> TextSource:
    """Open the given files, in the order of their names, as one text.

    Validation data is `validation_paths`, if set. Otherwise each file is divided into up to 64
    equal parts, and a fraction of `validation_fraction` at the end of each part is used for
    validation. Folders are accepted for data=tokens only. Raises DataError if a pattern matches no
    file or if a file does not contain tokens of the expected type.
    """
    train = _given_files(config.paths, config)
    if config.validation_paths:
        validation = _given_files(config.validation_paths, config)
    else:
        train, validation = _split_ends(train, config.validation_fraction, config.seq_len)
    what = ", ".join(config.paths)
    return _source(train, validation, config.seq_len, config.vocab_size, what)


def _python_files(root: Path) -> Iterable[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each not in _LEFT_OUT]
        for name in names:
            path = Path(folder, name)
            # A link may point to a file that differs between machines, such as local settings.
            if name.endswith(".py") and not path.is_symlink():
                yield path.relative_to(root).as_posix()


def _given_files(patterns: Sequence[str], config: TextConfig) -> list[Segment]:
    if isinstance(config, TokensConfig):
        patterns = [_data_of(pattern) for pattern in patterns]
        paths = without_indices(expand(patterns, (".bin", ".npy")))
    else:
        paths = expand(patterns)
    read: Callable[[Path], TokenFile]
    if isinstance(config, TokensConfig) or config.dtype != "uint8":
        read = partial(_tokens_of, config.dtype)
    else:
        read = _bytes_of
    # Open in parallel to read the headers: opening a file on a network file system is slow.
    with ThreadPoolExecutor(_NUM_OPENED) as pool:
        return [_all_of(file) for file in pool.map(read, paths)]


def _tokens_of(kind: str, path: Path) -> TokenFile:
    return open_token_file(path, path.name, kind)


def _bytes_of(path: Path) -> TokenFile:
    file = whole_file(path, path.name)
    if not file.num_tokens:
        raise empty(path)
    refuse_array(path)
    return file


def _data_of(pattern: str) -> str:
    """Append ".bin" to a path that names a Megatron-LM pair (.bin and .idx) without suffix."""
    data = Path(pattern + ".bin").expanduser()
    named = Path(pattern).expanduser()
    return str(data) if data.is_file() and not named.exists() else pattern


def _all_of(file: TokenFile) -> Segment:
    return Segment(file, 0, file.num_tokens)


def _split_ends(
    segments: Sequence[Segment], fraction: float, seq_len: int
) -> tuple[list[Segment], list[Segment]]:
    """Divide each file into equal parts and assign the end of each part to validation.

    Parts are long enough for several windows of `seq_len` tokens in each end. The end of the whole
    file alone may be unusual text.
    """
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
    seq_len: int,
    vocab_size: int,
    what: str,
) -> TextSource:
    maps = MappedFiles()
    windows, held = (
        TokenWindows(Corpus(part, vocab_size, maps), seq_len, vocab_size)
        for part in (train, validation)
    )
    num_files = len({each.file.path for each in (*train, *validation)})
    where = f"{what} ({num_files:,} file{'s' * (num_files > 1)})"
    source = TextSource(windows, held, about=about_text(where, windows, held))
    if not source.train.num_samples:
        raise UnfitDataError(
            f"data: too little text in {what}: training needs more than data.seq_len={seq_len} "
            f"tokens, got {source.train.corpus.num_tokens}; add text or lower data.seq_len"
        )
    return source
