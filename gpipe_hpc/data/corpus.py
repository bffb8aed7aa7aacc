"""Files of tokens as one long memory-mapped text, and the samples cut from it."""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpipe_hpc.data.mapped import MappedFiles
from gpipe_hpc.data.token_files import TokenFile
from gpipe_hpc.errors import UnfitDataError

Tokens = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


class TokenText(Protocol):
    """A long text of tokens, of which any part can be read."""

    @property
    def num_tokens(self) -> int:
        """Return the length of the text."""
        ...

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`; raise DataError where they cannot be read."""
        ...

    def digest(self) -> str:
        """Return a short text that is equal where the tokens are."""
        ...


class Segment(NamedTuple):
    """Tokens ``start`` to ``stop`` of a file."""

    file: TokenFile
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Return the file's name, the same on all machines."""
        return self.file.name


class Corpus:
    """Segments read as one text; files are mapped when they are used and never copied whole.

    `vocab_size`: tokens are smaller; `maps`: shared with other corpora of the same files.
    """

    def __init__(
        self, segments: Sequence[Segment], vocab_size: int = 256, maps: MappedFiles | None = None
    ) -> None:
        self.segments = tuple(each for each in segments if each.stop > each.start)
        self.vocab_size = vocab_size
        self._maps = MappedFiles() if maps is None else maps
        self._ends = tuple(accumulate(each.stop - each.start for each in self.segments))

    @property
    def num_tokens(self) -> int:
        """Return the length of the text."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`, which may span files.

        Raises DataError for a file that cannot be read, and for a token beyond the vocabulary.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"[{start}, {stop}) of {self.num_tokens}"
        parts = []
        position = bisect_right(self._ends, start)
        while start < stop:
            offset = self._ends[position - 1] if position else 0
            end = min(stop, self._ends[position])
            parts.append(self._part(self.segments[position], start - offset, end - offset))
            start, position = end, position + 1
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def digest(self) -> str:
        """Return a short text of names and lengths; reads no file."""
        listing = "\n".join(f"{each.name} {each.start} {each.stop}" for each in self.segments)
        return hashlib.sha256(listing.encode()).hexdigest()[:16]

    def _part(self, segment: Segment, start: int, stop: int) -> Tokens:
        first = segment.start + start
        tokens = self._maps.tokens(segment.file)[first : segment.start + stop]
        info = np.iinfo(tokens.dtype)
        is_beyond = info.max >= self.vocab_size and int(tokens.max()) >= self.vocab_size
        if is_beyond or (info.min < 0 and int(tokens.min()) < 0):
            place = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise UnfitDataError(
                f"data: {segment.file.path} has a token beyond the vocabulary at position "
                f"{first + place}, expected 0 or more and less than data.vocab_size="
                f"{self.vocab_size}, got {int(tokens[place])} ({segment.file.kind}); raise "
                f"data.vocab_size and the model's, or correct data.dtype"
            )
        return tokens


class TokenWindows:
    """Sample i: tokens from i x seq_len on; the targets are the inputs one token later."""

    def __init__(self, corpus: TokenText, seq_len: int, vocab_size: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.vocab_size = vocab_size

    @property
    def num_samples(self) -> int:
        """Return the windows that fit; fewer than seq_len tokens at the very end stay unused."""
        return max(0, (self.corpus.num_tokens - 1) // self.seq_len)

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 tokens, [len(indices), seq_len]."""
        return self._read(indices, shift=0)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return the int64 token that follows each input, [len(indices), seq_len]."""
        return self._read(indices, shift=1)

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.corpus.digest()}/{self.seq_len}"

    def _read(self, indices: Sequence[int], shift: int) -> Tensor:
        rows = np.empty((len(indices), self.seq_len), np.int64)
        for row, index in zip(rows, indices, strict=True):
            start = index * self.seq_len + shift
            row[:] = self.corpus.read(start, start + self.seq_len)
        return torch.from_numpy(rows)


@dataclass(frozen=True)
class TextSource:
    """Training and validation text."""

    train: TokenWindows
    validation: TokenWindows
    loss: str = "token_cross_entropy"
    corrupt: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def baseline(self) -> float | None:
        """Return the cost of guessing each validation token from how often it is in training.

        In nats a token; None without validation text.
        """
        if not self.validation.num_samples:
            return None
        return unigram_entropy(self.train.corpus, self.validation.corpus, self.train.vocab_size)


def about_text(what: str, train: TokenWindows, validation: TokenWindows) -> str:
    """Return what the log says of text: where it is from, how long it is, and its samples."""
    num_tokens = train.corpus.num_tokens + validation.corpus.num_tokens
    return (
        f"{what}: {num_tokens:,} tokens; {train.num_samples:,} samples of {train.seq_len} tokens "
        f"to train on, {validation.num_samples:,} held back"
    )


def unigram_entropy(
    train: TokenText, validation: TokenText, vocab_size: int, limit: int = 1 << 24
) -> float:
    """Return the cross-entropy, in nats, of validation tokens under training frequencies.

    Each token counts once more than seen, so that none is impossible. Looks at `limit` tokens of
    each at most, from all over it.
    """
    return frequency_cost(
        count_tokens(train, vocab_size, limit), count_tokens(validation, vocab_size, limit)
    )


def frequency_cost(seen: Counts, wanted: Counts) -> float:
    """Return the cross-entropy, in nats, of guessing `wanted` from how often each was `seen`."""
    likely = seen + 1
    return float(-(wanted * np.log(likely / likely.sum())).sum() / wanted.sum())


def count_tokens(text: TokenText, vocab_size: int, limit: int) -> Counts:
    """Return how often each token occurs in a text, or in `limit` tokens from all over it."""
    total = np.zeros(vocab_size, np.int64)
    wanted = min(limit, text.num_tokens)
    # As many blocks as are wanted, each at the start of an equal part of the text.
    num_blocks = -(-wanted // _BLOCK)
    for block in range(num_blocks):
        start = text.num_tokens * block // num_blocks
        length = wanted * (block + 1) // num_blocks - wanted * block // num_blocks
        total += np.bincount(text.read(start, start + length), minlength=vocab_size)
    return total


_BLOCK: Final = 1 << 20  # tokens counted at a time
