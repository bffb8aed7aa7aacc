"""Masked language modelling: some tokens are hidden, and the model is to tell which they were.

Devlin et al., BERT: Pre-training of deep bidirectional transformers, 2019: of the chosen tokens 8
in 10 become the mask token, 1 in 10 becomes any token, 1 in 10 stays; only chosen ones are targets.
Which, depends on (train.seed, epoch, sample, position) alone: not on the layout, nor on what a
sample is read together with. Validation hides the same tokens in every run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpipe_hpc.data.dataset import Dataset, DataSource
from gpipe_hpc.data.hashing import Words, hash_words
from gpipe_hpc.settings import TokenDataConfig

IGNORED: Final = -100
_STREAM: Final = 6  # apart from those of the sampler, of images and of synthetic samples
_TRAIN, _VALIDATION = 0, 1
_TENTHS_MASKED, _TENTHS_ANY = 8, 1


class _Hiding(NamedTuple):
    """How tokens are hidden. `key`: what the choice depends on, beside epoch and sample."""

    mask_token: int
    fraction: float
    vocab_size: int
    key: tuple[int, ...]


@dataclass(frozen=True)
class MaskedTokens:
    """Samples of another dataset of tokens: inputs with some hidden, and those as targets."""

    tokens: Dataset
    hiding: _Hiding

    @property
    def num_samples(self) -> int:
        """Return how many samples an epoch has."""
        return self.tokens.num_samples

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 tokens, [len(indices), seq_len], some of them hidden."""
        tokens: Tensor = self.tokens.read_inputs(indices, epoch)
        is_chosen = self._chosen(indices, epoch, tokens)
        lot = self._draw(indices, epoch, tokens, 1)
        tenth = _tensor(lot % np.uint64(10))
        anything = _tensor(lot // np.uint64(10) % np.uint64(self.hiding.vocab_size))
        is_masked = is_chosen & (tenth < _TENTHS_MASKED)
        is_any = is_chosen & ~is_masked & (tenth < _TENTHS_MASKED + _TENTHS_ANY)
        return tokens.masked_fill(is_masked, self.hiding.mask_token).where(~is_any, anything)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return the int64 tokens that were chosen, -100 elsewhere, [len(indices), seq_len]."""
        tokens: Tensor = self.tokens.read_inputs(indices, epoch)
        return tokens.where(self._chosen(indices, epoch, tokens), IGNORED)

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.tokens.digest()}/masked {tuple(self.hiding)}"

    def _chosen(self, indices: Sequence[int], epoch: int, tokens: Tensor) -> Tensor:
        draws = self._draw(indices, epoch, tokens, 0)
        return _tensor(draws >> np.uint64(11)) < self.hiding.fraction * 2**53

    def _draw(self, indices: Sequence[int], epoch: int, tokens: Tensor, number: int) -> Words:
        """Return 64 bits for each token."""
        samples = np.asarray(indices, np.uint64)[:, None]
        places = np.arange(tokens.shape[1], dtype=np.uint64)
        return hash_words(_STREAM, *self.hiding.key, epoch, number, samples, places)


@dataclass(frozen=True)
class MaskedSource:
    """Training and validation samples of a source of tokens, some of them hidden."""

    source: DataSource
    train: MaskedTokens
    validation: MaskedTokens

    @property
    def corrupt(self) -> Mapping[str, str]:
        """Return what was found corrupt on opening."""
        return self.source.corrupt

    @property
    def loss(self) -> str | None:
        """Return the name of the loss, which leaves out what was not chosen."""
        return self.source.loss

    @property
    def about(self) -> str:
        """Return what was found."""
        return self.source.about

    def baseline(self) -> float | None:
        """Return the cost of guessing each hidden token from how often it is in training."""
        return self.source.baseline()


def hide_tokens(source: DataSource, config: TokenDataConfig, seed: int) -> MaskedSource:
    """Return a source of which some tokens are hidden; `seed` is that of the run."""
    hiding = _Hiding(config.hidden_token, config.mask_fraction, config.vocab_size, (_TRAIN, seed))
    fixed = hiding._replace(key=(_VALIDATION, 0))
    return MaskedSource(
        source, MaskedTokens(source.train, hiding), MaskedTokens(source.validation, fixed)
    )


def _tensor(words: Words) -> Tensor:
    return torch.from_numpy(words.astype(np.int64))
