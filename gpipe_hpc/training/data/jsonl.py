"""JSON lines: documents, the bytes of their text as tokens, one after the other."""

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.config import JsonLinesConfig
from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data.corpus import TextSource, Tokens, TokenWindows
from gpipe_hpc.training.data.corruption import CorruptTally, tolerance
from gpipe_hpc.training.data.hashing import percentile
from gpipe_hpc.training.data.names import Names
from gpipe_hpc.training.data.paths import expand, unreadable

_KEPT_BYTES: Final = 2**24


class Line(NamedTuple):
    """Where a document lies, how many bytes its text has, and which percent it belongs to."""

    file: int
    offset: int
    num_bytes: int
    text_bytes: int
    percentile: int


@dataclass
class Documents:
    """The text of documents, each ended by a separator; read at random through their offsets.

    A document is decoded whole where a part of it is wanted, and kept for a while: a sample's
    inputs and targets come from the same ones.
    """

    paths: tuple[Path, ...]
    files: npt.NDArray[np.int32]
    spans: npt.NDArray[np.int64]  # [documents, 2]: offset, bytes of the line
    ends: npt.NDArray[np.int64]  # tokens up to the end of each, its separator included
    key: str
    separator: int
    _kept: OrderedDict[int, Tokens] = field(default_factory=OrderedDict, init=False, repr=False)
    _kept_bytes: int = field(default=0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @classmethod
    def of(
        cls, paths: Sequence[Path], lines: Sequence[Line], config: JsonLinesConfig
    ) -> "Documents":
        """Return the documents on these lines."""
        table = np.array(lines, np.int64).reshape(-1, len(Line._fields))
        ends = np.cumsum(table[:, 3] + 1)
        files = table[:, 0].astype(np.int32)
        return cls(tuple(paths), files, table[:, 1:3], ends, config.key, config.separator)

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
        names = Names(path.name for path in self.paths)
        return f"{names.digest(self.spans)}/{names.digest(self.ends)}/{self.separator}"

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
        path = self.paths[self.files[number]]
        offset, num_bytes = map(int, self.spans[number])
        try:
            with path.open("rb") as file:
                file.seek(offset)
                text = text_of(file.read(num_bytes), self.key)
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


def open_jsonl(config: JsonLinesConfig) -> TextSource:
    """Return the documents of the given files as text for training and validation.

    Reads every line once, to find the documents and how long they are. Validation is
    `validation_paths`, or `validation_percent` of the documents, by a hash of their text: equal
    documents are on one side. Raises DataError for a pattern without files, where more lines are
    corrupt than data.corrupt bears, and without text to train on.
    """
    tally = CorruptTally(tolerance(config))
    paths = expand(config.paths, (".jsonl",))
    lines, wrong = _index(paths, config.key, tally)
    if config.validation_paths:
        held_paths = expand(config.validation_paths, (".jsonl",))
        held, more = _index(held_paths, config.key, tally)
        wrong |= more
    else:
        held_paths = paths
        held = [each for each in lines if each.percentile < config.validation_percent]
        lines = [each for each in lines if each.percentile >= config.validation_percent]
    train, validation = (
        TokenWindows(Documents.of(where, part, config), config.seq_len, config.vocab_size)
        for where, part in ((paths, lines), (held_paths, held))
    )
    if not train.num_samples:
        raise DataError(
            f"data: too little text in {', '.join(config.paths)}, expected more than data.seq_len="
            f"{config.seq_len} tokens to train on, got {train.corpus.num_tokens}; give more "
            f"documents or lower data.seq_len"
        )
    return TextSource(train, validation, corrupt=wrong)


def text_of(line: bytes, key: str) -> bytes:
    """Return the text of a document as UTF-8; raise ValueError where the line is none."""
    try:
        text = json.loads(line)[key]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no object with {key!r}") from error
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {type(text).__name__}, no text")
    return text.encode()


def _index(
    paths: Sequence[Path], key: str, tally: CorruptTally
) -> tuple[list[Line], dict[str, str]]:
    """Return the documents of files, and by name what is wrong with the other lines."""
    lines: list[Line] = []
    wrong: dict[str, str] = {}
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file:
                offset = 0
                for place, line in enumerate(file, start=1):
                    if not line.isspace():
                        try:
                            text = text_of(line, key)
                            lines.append(
                                Line(number, offset, len(line), len(text), percentile(text))
                            )
                        except ValueError as error:
                            where = f"{path}, line {place}"
                            wrong[where] = _complaint(where, key, str(error))
                            tally.add({where: wrong[where]}, says=False)
                    offset += len(line)
        except OSError as error:
            raise unreadable(path, error) from error
    return lines, wrong


def _complaint(where: str, key: str, got: str) -> str:
    return (
        f"data: {where} is corrupt, expected a JSON object with text under {key!r}, got {got}; "
        f"correct it or data.key, or leave such lines out with data.corrupt=skip"
    )
