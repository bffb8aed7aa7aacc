"""Memory-mapped token files concatenated to one text, and training samples cut from that text."""

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
    """A sequence of tokens of any length with random access."""

    @property
    def num_tokens(self) -> int:
        """Return the length of the text in tokens."""
        ...

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`; raise DataError if they cannot be read."""
        ...

    def digest(self) -> str:
        """Return a digest of the text; equal digests mean equal tokens."""
        ...


class Segment(NamedTuple):
    """Tokens ``start`` to ``stop`` of a file."""

    file: TokenFile
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Return the file's name, which is equal on all machines."""
        return self.file.name


class Corpus:
    """Segments of files read as one text through memory maps.

    Args:
        segments: the parts of files, in order; empty ones are dropped.
        vocab_size: upper bound of the tokens; a larger token is an error when it is read.
        maps: open memory maps, shared with other corpora of the same files.
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
        """Return the length of the text in tokens."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`, which may span files.

        Raises DataError if a file cannot be read, or if a token is outside the vocabulary.
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
        """Return a digest of file names and segment lengths, without reading files."""
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
                f"data: {segment.file.path} has a token outside the vocabulary at position "
                f"{first + place}: expected 0 or more and less than data.vocab_size="
                f"{self.vocab_size}, got {int(tokens[place])} ({segment.file.kind}); raise "
                f"data.vocab_size and the model's, or correct data.dtype"
            )
        return tokens


class TokenWindows:
    """Dataset of windows of seq_len tokens of a text; targets are the inputs shifted by one."""

    def __init__(self, corpus: TokenText, seq_len: int, vocab_size: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.vocab_size = vocab_size

    @property
    def num_samples(self) -> int:
        """Return the number of complete windows; tokens after the last one are unused."""
        return max(0, (self.corpus.num_tokens - 1) // self.seq_len)

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 tokens of shape [len(indices), seq_len]."""
        return self._read(indices, shift=0)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return the next token of each input, int64 of shape [len(indices), seq_len]."""
        return self._read(indices, shift=1)

    def digest(self) -> str:
        """Return a digest of the text and the sequence length."""
        return f"{self.corpus.digest()}/{self.seq_len}"

    def _read(self, indices: Sequence[int], shift: int) -> Tensor:
        rows = np.empty((len(indices), self.seq_len), np.int64)
        for row, index in zip(rows, indices, strict=True):
            start = index * self.seq_len + shift
            row[:] = self.corpus.read(start, start + self.seq_len)
        return torch.from_numpy(rows)


@dataclass(frozen=True)
class TextSource:
    """Training and validation text, with a description and a baseline loss."""

    train: TokenWindows
    validation: TokenWindows
    loss: str = "token_cross_entropy"
    corrupt: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def baseline(self) -> float | None:
        """Return the validation loss of predicting tokens by their training frequency.

        In nats per token; None if there is no validation text.
        """
        if not self.validation.num_samples:
            return None
        return unigram_entropy(self.train.corpus, self.validation.corpus, self.train.vocab_size)


def about_text(what: str, train: TokenWindows, validation: TokenWindows) -> str:
    """Return the log line that describes text data: origin, length and numbers of samples."""
    num_tokens = train.corpus.num_tokens + validation.corpus.num_tokens
    return (
        f"{what}: {num_tokens:,} tokens; {train.num_samples:,} samples of {train.seq_len} tokens "
        f"for training, {validation.num_samples:,} for validation"
    )


def unigram_entropy(
    train: TokenText, validation: TokenText, vocab_size: int, limit: int = 1 << 24
) -> float:
    """Return the cross-entropy, in nats, of validation tokens under training token frequencies.

    Each training count is incremented by one, so that no token has probability 0. Counts at most
    `limit` tokens of each text, spread over it.
    """
    return frequency_cost(
        count_tokens(train, vocab_size, limit), count_tokens(validation, vocab_size, limit)
    )


def frequency_cost(seen: Counts, wanted: Counts) -> float:
    """Return the cross-entropy, in nats, of counts `wanted` under the smoothed counts `seen`."""
    likely = seen + 1
    return float(-(wanted * np.log(likely / likely.sum())).sum() / wanted.sum())


def count_tokens(text: TokenText, vocab_size: int, limit: int) -> Counts:
    """Count each token in a text, or in `limit` tokens spread over it."""
    total = np.zeros(vocab_size, np.int64)
    wanted = min(limit, text.num_tokens)
    # Divide the text into equal parts and count a block at the start of each.
    num_blocks = -(-wanted // _BLOCK)
    for block in range(num_blocks):
        start = text.num_tokens * block // num_blocks
        length = wanted * (block + 1) // num_blocks - wanted * block // num_blocks
        total += np.bincount(text.read(start, start + length), minlength=vocab_size)
    return total


_BLOCK: Final = 1 << 20  # tokens counted at a time
