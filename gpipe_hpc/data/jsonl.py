"""JSON lines: documents, the bytes of their text as tokens, one after the other."""

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
from gpipe_hpc.data.indexing.crew import Task, in_order
from gpipe_hpc.data.indexing.lines import read_line, text_of
from gpipe_hpc.data.indexing.parts import Part
from gpipe_hpc.data.indices import Keeping, indexed
from gpipe_hpc.data.names import Names
from gpipe_hpc.data.paths import expand, refuse_shrunk, unreadable
from gpipe_hpc.errors import DataError, UnfitDataError
from gpipe_hpc.settings import Choices, Level, Range, TokenDataConfig, refuse


@dataclass
class JsonLinesConfig(TokenDataConfig):
    """Documents, one JSON object a line, bytes as tokens."""

    paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files, patterns or folders, as [corpus/*.jsonl]."""

    validation_paths: Annotated[list[str], Level.EVERYDAY] = field(default_factory=list)
    """Files, patterns or folders for validation. []: a part of paths."""

    validation_percent: Annotated[int, Range(0, 99), Level.EVERYDAY] = 5
    """Percentage of documents for validation, chosen by a hash of their text."""

    key: Annotated[str, Level.EVERYDAY] = "text"
    """Key of the text in each object."""

    separator: int = 256
    """Token that ends each document; bytes are 0 to 255."""

    vocab_size: int = field(default=257, kw_only=True)
    index_dir: Annotated[str | None, Level.CLUSTER] = field(default=None, kw_only=True)
    """Folder of the index for later runs. null: .gpipe_hpc next to the data, or run.dir."""

    corrupt: Annotated[str, Choices("stop", "skip")] = "stop"
    """What happens at a line that cannot be read: stop, or skip it."""

    max_corrupt: Annotated[int, Range(1)] = 100
    """Largest number of skipped lines."""

    @property
    def holds_bytes(self) -> bool:
        """Say whether tokens are the bytes of texts."""
        return True

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        super().check()
        if not self.paths:
            raise refuse("data.paths", "files or patterns", [], "as data.paths=[corpus/*]")
        if not 0 <= self.separator < self.vocab_size or self.vocab_size < 256:
            raise refuse(
                "data.separator",
                f"a token below data.vocab_size={self.vocab_size}, itself 256 or more for bytes",
                self.separator,
                "leave data.separator at 256 and data.vocab_size at 257",
            )

    def open(self, seed: int, spare: Path | None) -> TextSource:
        """Return what `open_jsonl` does."""
        return open_jsonl(self, spare)


_BLOCK: Final = 2**25  # bytes of a file that one task looks through
_WORTH_KEEPING: Final = 2**26  # bytes of files; the index of fewer is made in a second
_KEPT_BYTES: Final = 2**24


@dataclass(frozen=True)
class Lines:
    """Where documents lie: of each its file, the bytes of its line, and those of its text."""

    paths: tuple[Path, ...]
    files: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    text_bytes: npt.NDArray[np.int64]
    percentiles: npt.NDArray[np.uint8]
    wrong: Mapping[str, str]  # what else is in the files: name -> complaint


@dataclass
class Documents:
    """The text of documents, each ended by a separator; read at random through their offsets.

    A document is decoded whole where a part of it is wanted, and kept for a while: a sample's
    inputs and targets come from the same ones.
    """

    lines: Lines
    chosen: npt.NDArray[np.int64]  # the number of each document's line
    ends: npt.NDArray[np.int64]  # tokens up to the end of each, its separator included
    key: str
    separator: int
    _kept: OrderedDict[int, Tokens] = field(default_factory=OrderedDict, init=False, repr=False)
    _kept_bytes: int = field(default=0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @classmethod
    def of(
        cls, lines: Lines, is_chosen: npt.NDArray[np.bool_], config: JsonLinesConfig
    ) -> "Documents":
        """Return the documents on those lines that are marked."""
        chosen = np.flatnonzero(is_chosen)
        ends = np.cumsum(lines.text_bytes[chosen] + 1)
        return cls(lines, chosen, ends, config.key, config.separator)

    @property
    def num_tokens(self) -> int:
        """Return the length of the text, separators included."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`; raise DataError where a file has changed."""
        parts = []
        document = bisect_right(self.ends, start)
        while start < stop:
            first = int(self.ends[document - 1]) if document else 0
            end = min(stop, int(self.ends[document]))
            parts.append(self._document(document)[start - first : end - first])
            start, document = end, document + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def digest(self) -> str:
        """Return a short text of the files' names and the places of the documents."""
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
            f"data: {path} has changed, expected the document at byte {offset} as it was, got "
            f"{got}; keep data files as they are while a run reads them"
        )


def open_jsonl(config: JsonLinesConfig, spare: Path | None = None) -> TextSource:
    """Return the documents of the given files as text for training and validation.

    Reads every line once, to find the documents and how long they are, unless an earlier run kept
    that. Validation is `validation_paths`, or `validation_percent` of the documents, by a hash of
    their text: equal documents are on one side. `spare`: where the index is kept if the data's
    folder is read-only. Raises DataError for a pattern without files, where more lines are corrupt
    than data.corrupt bears, and without text to train on.
    """
    tally = CorruptTally(tolerance(config))
    keeping = Keeping(config.index_dir, spare)
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
            f"data: too little text in {', '.join(config.paths)}, expected more than data.seq_len="
            f"{config.seq_len} tokens to train on, got {train.corpus.num_tokens}; give more "
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


def _find_lines(patterns: Sequence[str], key: str, keeping: Keeping, tally: CorruptTally) -> Lines:
    """Return the documents of files; DataError where more lines are corrupt than `tally` bears."""
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
    return Lines(
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
) -> Part:
    """Return where the documents of files lie, and `wrong`: file, line from 1, what it is."""
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
        # Where not even the first line of all is a document, the key or the file is the wrong one.
        is_unfit = not tally.limit and any((place, line) == (0, 1) for place, line, _ in new)
        kind = UnfitDataError if is_unfit else DataError
        # At once: who stops at the first corrupt line need not read the others.
        tally.add(_complaints(Part({}, {"wrong": new}), paths, key), says=False, kind=kind)
        columns["file"].append(np.full(len(part.arrays["offset"]), file, np.int32))
        for name in _COLUMNS:
            columns[name].append(part.arrays[name])
    empty = {"file": np.int32, "percentile": np.uint8}
    arrays = {
        name: np.concatenate([np.empty(0, empty.get(name, np.int64)), *found])
        for name, found in columns.items()
    }
    return Part(arrays, {"wrong": wrong})


def _task(path: Path, start: int, size: int, key: str) -> Task:
    stop = min(size, start + _BLOCK)
    words = {"scan": "lines", "path": str(path), "start": start, "stop": stop, "key": key}
    return Task(words, path, stop - start)


def _is_sound(part: Part, paths: Sequence[Path], sizes: npt.NDArray[np.int64]) -> bool:
    """Say whether what a kept index says is within the files; raises ValueError and the like."""
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


def _complaints(part: Part, paths: Sequence[Path], key: str) -> dict[str, str]:
    places = ((f"{paths[file]}, line {line}", what) for file, line, what in part.facts["wrong"])
    return {where: _complaint(where, key, what) for where, what in places}


def _complaint(where: str, key: str, got: str) -> str:
    return (
        f"data: {where} is corrupt, expected a JSON object with text under {key!r}, got {got}; "
        f"correct it or data.key, or leave such lines out with data.corrupt=skip"
    )
