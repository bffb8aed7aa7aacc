"""Files of tokens as one long memory-mapped text, and the samples cut from it."""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data.paths import unreadable

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
    """Tokens ``start`` to ``stop`` of a file; ``name`` is its path where all ranks agree on one."""

    path: Path
    name: str
    start: int
    stop: int


class Corpus:
    """Segments read as one text; each file is mapped at its first use and never copied whole."""

    def __init__(self, segments: Sequence[Segment], dtype: str = "uint8") -> None:
        self.segments = tuple(each for each in segments if each.stop > each.start)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        lengths = (each.stop - each.start for each in self.segments)
        self._ends = tuple(accumulate(lengths))
        self._maps: dict[int, Tokens] = {}

    @property
    def num_tokens(self) -> int:
        """Return the length of the text."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`, which may span files; raise DataError if unreadable."""
        assert 0 <= start <= stop <= self.num_tokens, f"[{start}, {stop}) of {self.num_tokens}"
        parts = []
        position = bisect_right(self._ends, start)
        while start < stop:
            offset = self._ends[position - 1] if position else 0
            end = min(stop, self._ends[position])
            parts.append(self._segment(position)[start - offset : end - offset])
            start, position = end, position + 1
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def digest(self) -> str:
        """Return a short text of names and lengths; reads no file."""
        listing = "\n".join(f"{each.name} {each.start} {each.stop}" for each in self.segments)
        return hashlib.sha256(listing.encode()).hexdigest()[:16]

    def _segment(self, position: int) -> Tokens:
        if position not in self._maps:
            segment = self.segments[position]
            try:
                whole = np.memmap(segment.path, self.dtype, mode="r")
            except (OSError, ValueError) as error:
                raise unreadable(segment.path, error) from error
            if len(whole) < segment.stop:
                raise DataError(
                    f"data: {segment.path} has changed, expected at least {segment.stop} tokens, "
                    f"got {len(whole)}; keep data files as they are while a run reads them"
                )
            self._maps[position] = whole[segment.start : segment.stop]
        return self._maps[position]


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

    def read_targets(self, indices: Sequence[int]) -> Tensor:
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
        if rows.size and int(rows.max()) >= self.vocab_size:
            raise DataError(
                f"data: token too large, expected less than data.vocab_size={self.vocab_size}, got "
                f"{int(rows.max())}; raise data.vocab_size or check data.dtype"
            )
        return torch.from_numpy(rows)


@dataclass(frozen=True)
class TextSource:
    """Training and validation text."""

    train: TokenWindows
    validation: TokenWindows
    loss: str = "token_cross_entropy"
    corrupt: Mapping[str, str] = field(default_factory=dict)

    def baseline(self) -> float | None:
        """Return the cost of guessing each validation token from how often it is in training.

        In nats a token; None without validation text.
        """
        if not self.validation.num_samples:
            return None
        return unigram_entropy(self.train.corpus, self.validation.corpus, self.train.vocab_size)


def unigram_entropy(
    train: TokenText, validation: TokenText, vocab_size: int, limit: int = 1 << 26
) -> float:
    """Return the cross-entropy, in nats, of validation tokens under training frequencies.

    Each token counts once more than seen, so that none is impossible. Looks at the first `limit`
    tokens of each.
    """
    return frequency_cost(
        count_tokens(train, vocab_size, limit), count_tokens(validation, vocab_size, limit)
    )


def frequency_cost(seen: Counts, wanted: Counts) -> float:
    """Return the cross-entropy, in nats, of guessing `wanted` from how often each was `seen`."""
    likely = seen + 1
    return float(-(wanted * np.log(likely / likely.sum())).sum() / wanted.sum())


def count_tokens(text: TokenText, vocab_size: int, limit: int) -> Counts:
    """Return how often each token occurs among the first `limit` tokens."""
    total = np.zeros(vocab_size, np.int64)
    stop = min(limit, text.num_tokens)
    for start in range(0, stop, _BLOCK):
        total += np.bincount(text.read(start, min(stop, start + _BLOCK)), minlength=vocab_size)
    return total


_BLOCK = 1 << 22  # tokens counted at a time
