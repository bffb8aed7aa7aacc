"""Masked language modelling as in BERT (Devlin et al., 2019).

Of the selected tokens 80 % become the mask token, 10 % a random token, and 10 % stay unchanged;
only selected tokens are targets. The selection depends only on (train.seed, epoch, sample,
position), not on the layout or the batch. Validation masks the same tokens in every run.
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
_STREAM: Final = 6  # random stream; the sampler, images and synthetic samples use others
_TRAIN, _VALIDATION = 0, 1
_TENTHS_MASKED, _TENTHS_ANY = 8, 1


class _Masking(NamedTuple):
    """Parameters of masking; `key` is the part of the random key besides epoch and sample."""

    mask_token: int
    fraction: float
    vocab_size: int
    key: tuple[int, ...]


@dataclass(frozen=True)
class MaskedTokens:
    """Dataset that masks tokens of another dataset: masked inputs, original tokens as targets."""

    tokens: Dataset
    masking: _Masking

    @property
    def num_samples(self) -> int:
        """Return the number of samples per epoch."""
        return self.tokens.num_samples

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 tokens of shape [len(indices), seq_len], some of them masked."""
        tokens: Tensor = self.tokens.read_inputs(indices, epoch)
        is_chosen = self._chosen(indices, epoch, tokens)
        lot = self._draw(indices, epoch, tokens, 1)
        tenth = _tensor(lot % np.uint64(10))
        anything = _tensor(lot // np.uint64(10) % np.uint64(self.masking.vocab_size))
        is_masked = is_chosen & (tenth < _TENTHS_MASKED)
        is_any = is_chosen & ~is_masked & (tenth < _TENTHS_MASKED + _TENTHS_ANY)
        return tokens.masked_fill(is_masked, self.masking.mask_token).where(~is_any, anything)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return the selected tokens, -100 elsewhere, int64 of shape [len(indices), seq_len]."""
        tokens: Tensor = self.tokens.read_inputs(indices, epoch)
        return tokens.where(self._chosen(indices, epoch, tokens), IGNORED)

    def digest(self) -> str:
        """Return a digest of the tokens and of the parameters of masking."""
        return f"{self.tokens.digest()}/masked {tuple(self.masking)}"

    def _chosen(self, indices: Sequence[int], epoch: int, tokens: Tensor) -> Tensor:
        draws = self._draw(indices, epoch, tokens, 0)
        return _tensor(draws >> np.uint64(11)) < self.masking.fraction * 2**53

    def _draw(self, indices: Sequence[int], epoch: int, tokens: Tensor, number: int) -> Words:
        """Return 64 random bits for each token, of shape [len(indices), seq_len]."""
        samples = np.asarray(indices, np.uint64)[:, None]
        places = np.arange(tokens.shape[1], dtype=np.uint64)
        return hash_words(_STREAM, *self.masking.key, epoch, number, samples, places)


@dataclass(frozen=True)
class MaskedSource:
    """Training and validation sets of tokens with masking applied."""

    source: DataSource
    train: MaskedTokens
    validation: MaskedTokens

    @property
    def corrupt(self) -> Mapping[str, str]:
        """Return the error messages of corrupt samples, by sample name."""
        return self.source.corrupt

    @property
    def loss(self) -> str | None:
        """Return the name of the loss, which must ignore targets of -100."""
        return self.source.loss

    @property
    def about(self) -> str:
        """Return a description of the data for the log."""
        return self.source.about

    def baseline(self) -> float | None:
        """Return the loss of predicting tokens by their training frequency, in nats per token."""
        return self.source.baseline()


def mask_tokens(source: DataSource, config: TokenDataConfig, seed: int) -> MaskedSource:
    """Apply masking to the training and validation tokens of a source; `seed` is train.seed."""
    masking = _Masking(config.hidden_token, config.mask_fraction, config.vocab_size, (_TRAIN, seed))
    fixed = masking._replace(key=(_VALIDATION, 0))
    return MaskedSource(
        source, MaskedTokens(source.train, masking), MaskedTokens(source.validation, fixed)
    )


def _tensor(words: Words) -> Tensor:
    return torch.from_numpy(words.astype(np.int64))
