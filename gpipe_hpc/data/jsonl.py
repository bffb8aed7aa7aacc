"""Text data from JSON Lines files: the concatenated UTF-8 bytes of all documents are the tokens."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.corpus import TextSource, Tokens, TokenWindows, about_text
from gpipe_hpc.data.corruption import CorruptTally, tolerance
from gpipe_hpc.data.indexing.lines import read_line, text_of
from gpipe_hpc.data.indexing.parts import IndexPart
from gpipe_hpc.data.indexing.worker_pool import IndexingTask, in_order
from gpipe_hpc.data.indices import IndexFolders, indexed
from gpipe_hpc.data.names import Names
from gpipe_hpc.data.paths import expand, refuse_shrunk, unreadable
from gpipe_hpc.errors import DataError, UnfitDataError
from gpipe_hpc.settings import Choices, Level, Range, TokenDataConfig, refuse


@dataclass
class JsonLinesConfig(TokenDataConfig):
    """Settings for JSON Lines files, with one document per line and bytes as tokens."""

    paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files, patterns or folders, for example [corpus/*.jsonl]."""

    validation_paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files, patterns or folders for validation. []: a part of paths."""

    validation_percent: Annotated[int, Range(0, 99), Level.EVERYDAY] = 5
    """Percentage of documents for validation, chosen by a hash of their text."""

    key: Annotated[str, Level.EVERYDAY] = "text"
    """Key of the text in each JSON object."""

    separator: int = 256
    """Token that ends each document; bytes are 0 to 255."""

    vocab_size: int = field(default=257, kw_only=True)
    index_dir: Annotated[str | None, Level.CLUSTER] = field(default=None, kw_only=True)
    """Folder of the index for later runs. null: .gpipe_hpc next to the data, or run.dir."""

    corrupt: Annotated[str, Choices("stop", "skip")] = "stop"
    """Action at a line that cannot be read: stop the run, or skip the line."""

    max_corrupt: Annotated[int, Range(1)] = 100
    """Maximum number of skipped lines."""

    @property
    def holds_bytes(self) -> bool:
        """Return whether tokens are bytes of text: always True."""
        return True

    def check(self) -> None:
        """Check the settings; raise ConfigError if they are inconsistent."""
        super().check()
        if not self.paths:
            raise refuse("data.paths", "files or patterns", [], "as data.paths=[corpus/*]")
        if not 0 <= self.separator < self.vocab_size or self.vocab_size < 256:
            raise refuse(
                "data.separator",
                f"0 or more and less than data.vocab_size={self.vocab_size}, which must be at "
                f"least 256",
                self.separator,
                "leave data.separator at 256 and data.vocab_size at 257",
            )

    def open(self, seed: int, spare: Path | None) -> TextSource:
        """Open the files with `open_jsonl`."""
        return open_jsonl(self, spare)


_BLOCK: Final = 2**25  # bytes of a file that one task scans
_WORTH_KEEPING: Final = 2**26  # bytes; smaller data is indexed again in about a second
_KEPT_BYTES: Final = 2**24  # of decoded documents in the cache


@dataclass(frozen=True)
class DocumentIndex:
    """Locations of all documents: file, line offset and length, text length and hash percentile."""

    paths: tuple[Path, ...]
    files: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    text_bytes: npt.NDArray[np.int64]
    percentiles: npt.NDArray[np.uint8]
    wrong: Mapping[str, str]  # unreadable lines: location -> error message


@dataclass
class Documents:
    """The concatenated text of documents, each ended by a separator, with random access.

    A document is decoded as a whole when a part of it is read, and cached: a sample's inputs and
    targets come from the same documents.
    """

    lines: DocumentIndex
    chosen: npt.NDArray[np.int64]  # index into `lines` of each document
    ends: npt.NDArray[np.int64]  # cumulative number of tokens, separators included
    key: str
    separator: int
    _kept: OrderedDict[int, Tokens] = field(default_factory=OrderedDict, init=False, repr=False)
    _kept_bytes: int = field(default=0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @classmethod
    def of(
        cls, lines: DocumentIndex, is_chosen: npt.NDArray[np.bool_], config: JsonLinesConfig
    ) -> "Documents":
        """Create the text of the documents selected by a boolean mask over `lines`."""
        chosen = np.flatnonzero(is_chosen)
        ends = np.cumsum(lines.text_bytes[chosen] + 1)
        return cls(lines, chosen, ends, config.key, config.separator)

    @property
    def num_tokens(self) -> int:
        """Return the length of the text in tokens, separators included."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`; raise DataError if a file has changed since indexing."""
        parts = []
        document = bisect_right(self.ends, start)
        while start < stop:
            first = int(self.ends[document - 1]) if document else 0
            end = min(stop, int(self.ends[document]))
            parts.append(self._document(document)[start - first : end - first])
            start, document = end, document + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def digest(self) -> str:
        """Return a digest of the file names, document positions and separator."""
        names = Names(path.name for path in self.lines.paths)
        places = names.digest(self.lines.offsets[self.chosen])
        return f"{places}/{names.digest(self.ends)}/{self.separator}"

    def _document(self, number: int) -> Tokens:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        tokens = self._decode(number)
        with self._lock:
            if number not in self._kept:
                self._kept[number] = tokens
                self._kept_bytes += tokens.nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return tokens

    def _decode(self, number: int) -> Tokens:
        line = self.chosen[number]
        refuse_shrunk(self.lines.offsets)
        path = self.lines.paths[self.lines.files[line]]
        offset, num_bytes = int(self.lines.offsets[line]), int(self.lines.num_bytes[line])
        try:
            with path.open("rb") as file:
                text = text_of(read_line(file, offset, num_bytes), self.key)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise self._changed(path, offset, str(error)) from error
        length = int(self.ends[number]) - (int(self.ends[number - 1]) if number else 0)
        if len(text) + 1 != length:
            raise self._changed(path, offset, f"{len(text)} bytes of text")
        tokens = np.empty(length, np.int32)
        tokens[:-1] = np.frombuffer(text, np.uint8)
        tokens[-1] = self.separator
        return tokens

    def _changed(self, path: Path, offset: int, got: str) -> DataError:
        return DataError(
            f"data: {path} has changed since it was indexed: the document at byte {offset} is now "
            f"{got}; do not modify data files while a run reads them"
        )


def open_jsonl(config: JsonLinesConfig, spare: Path | None = None) -> TextSource:
    """Open JSON Lines files as text for training and validation.

    Reads every line once to locate the documents, unless an index from an earlier run exists.
    Validation data is `validation_paths`, or `validation_percent` of the documents, selected by a
    hash of their text, so that equal documents are in the same split.

    Args:
        config: the data settings.
        spare: folder for the index if the folder of the data is read-only.

    Raises:
        DataError: if a pattern matches no file, if more lines are corrupt than data.corrupt and
            data.max_corrupt allow, or if there is too little text to train on.
    """
    tally = CorruptTally(tolerance(config))
    keeping = IndexFolders(config.index_dir, spare)
    lines = _find_lines(config.paths, config.key, keeping, tally)
    held = lines
    is_held = lines.percentiles < config.validation_percent
    is_kept = ~is_held
    if config.validation_paths:
        held = _find_lines(config.validation_paths, config.key, keeping, tally)
        is_held = np.ones(len(held.files), np.bool_)
        is_kept = np.ones(len(lines.files), np.bool_)
    train, validation = (
        TokenWindows(Documents.of(where, chosen, config), config.seq_len, config.vocab_size)
        for where, chosen in ((lines, is_kept), (held, is_held))
    )
    if not train.num_samples:
        raise UnfitDataError(
            f"data: too little text in {', '.join(config.paths)}: training needs more than "
            f"data.seq_len={config.seq_len} tokens, got {train.corpus.num_tokens}; add "
            f"documents or lower data.seq_len"
        )
    num_documents = int(is_kept.sum() + is_held.sum())
    where = f"{', '.join(config.paths)} ({num_documents:,} documents)"
    return TextSource(
        train,
        validation,
        corrupt={**lines.wrong, **held.wrong},
        about=about_text(where, train, validation),
    )


def _find_lines(
    patterns: Sequence[str], key: str, keeping: IndexFolders, tally: CorruptTally
) -> DocumentIndex:
    """Index the documents of all matching files; raise DataError if `tally` exceeds its limit."""
    paths = expand(patterns, (".jsonl",))
    try:
        sizes = np.array([path.stat().st_size for path in paths], np.int64)
        part = indexed(
            "jsonl",
            paths,
            {"key": key},
            keeping,
            make=lambda: _scan(paths, sizes, key, tally),
            is_sound=lambda part: _is_sound(part, paths, sizes),
            is_worth_keeping=lambda _: int(sizes.sum()) >= _WORTH_KEEPING,
        )
    except OSError as error:
        raise unreadable(Path(error.filename or paths[0]), error) from error
    wrong = _complaints(part, paths, key)
    tally.add(wrong, says=False)
    found = part.arrays
    return DocumentIndex(
        tuple(paths),
        files=found["file"],
        offsets=found["offset"],
        num_bytes=found["num_bytes"],
        text_bytes=found["text_bytes"],
        percentiles=found["percentile"],
        wrong=wrong,
    )


_COLUMNS: Final = ("offset", "num_bytes", "text_bytes", "percentile")


def _scan(
    paths: Sequence[Path], sizes: npt.NDArray[np.int64], key: str, tally: CorruptTally
) -> IndexPart:
    """Scan files in parallel; return document columns and `wrong`, (file, line, error) triples."""
    files = [file for file, size in enumerate(sizes) for _ in range(0, int(size), _BLOCK)]
    tasks = [
        _task(path, start, int(size), key)
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, int(size), _BLOCK)
    ]
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in ("file", *_COLUMNS)}
    wrong: list[tuple[int, int, str]] = []
    num_lines = [0] * len(paths)
    for file, part in zip(files, in_order(tasks), strict=True):
        new = [(file, num_lines[file] + line + 1, what) for line, what in part.facts["wrong"]]
        num_lines[file] += part.facts["lines"]
        wrong += new
        # If the very first line is not a document, data.key or data.paths is probably wrong.
        is_unfit = not tally.limit and any((place, line) == (0, 1) for place, line, _ in new)
        kind = UnfitDataError if is_unfit else DataError
        # Count after each block, so that a run that stops at corrupt lines reads no further.
        tally.add(_complaints(IndexPart({}, {"wrong": new}), paths, key), says=False, kind=kind)
        columns["file"].append(np.full(len(part.arrays["offset"]), file, np.int32))
        for name in _COLUMNS:
            columns[name].append(part.arrays[name])
    empty = {"file": np.int32, "percentile": np.uint8}
    arrays = {
        name: np.concatenate([np.empty(0, empty.get(name, np.int64)), *found])
        for name, found in columns.items()
    }
    return IndexPart(arrays, {"wrong": wrong})


def _task(path: Path, start: int, size: int, key: str) -> IndexingTask:
    stop = min(size, start + _BLOCK)
    words = {"scan": "lines", "path": str(path), "start": start, "stop": stop, "key": key}
    return IndexingTask(words, path, stop - start)


def _is_sound(part: IndexPart, paths: Sequence[Path], sizes: npt.NDArray[np.int64]) -> bool:
    """Return whether all positions of a stored index lie within the files.

    Malformed error entries raise ValueError, TypeError or IndexError.
    """
    file, *columns = (part.arrays[name] for name in ("file", *_COLUMNS))
    offset, num_bytes, text_bytes, _ = columns
    _complaints(part, paths, key="")
    if any(column.shape != (len(file),) for column in columns):
        return False
    if not len(file):
        return True
    if int(file.min()) < 0 or int(file.max()) >= len(sizes):
        return False
    texts = (text_bytes >= 0) & (text_bytes <= num_bytes)
    return bool((texts & (offset >= 0) & (offset + num_bytes <= sizes[file])).all())


def _complaints(part: IndexPart, paths: Sequence[Path], key: str) -> dict[str, str]:
    places = ((f"{paths[file]}, line {line}", what) for file, line, what in part.facts["wrong"])
    return {where: _complaint(where, key, what) for where, what in places}


def _complaint(where: str, key: str, got: str) -> str:
    return (
        f"data: {where} is corrupt: expected a JSON object with text under {key!r}, got {got}; "
        f"correct the line or data.key, or set data.corrupt=skip to skip such lines"
    )
