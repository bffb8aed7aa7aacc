"""Samples computed from their number alone: no file, the same on every machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpipe_hpc.data.dataset import Dataset
from gpipe_hpc.data.hashing import Words, hash_words
from gpipe_hpc.settings import (
    DataConfig,
    ImageDataConfig,
    Level,
    Range,
    Shape,
    Shapes,
    TokenDataConfig,
)

# Streams of numbers that must not meet: one a split, and one for what the splits share.
_TRAIN: Final = 1
_VALIDATION: Final = 2
_SHARED: Final = 3


@dataclass(frozen=True)
class SyntheticSource:
    """Training and validation samples of one kind."""

    train: Dataset
    validation: Dataset
    loss: str
    corrupt: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def baseline(self) -> float | None:
        """Return None: what a guess costs says nothing about made-up data."""
        return None


@dataclass
class SyntheticTokensConfig(TokenDataConfig):
    """Token sequences made from the sample's number."""

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Samples of an epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Samples of the validation set."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Return what `open_synthetic_tokens` does."""
        return open_synthetic_tokens(self)


@dataclass
class SyntheticVectorsConfig(DataConfig):
    """Vectors and their classes, made from the sample's number."""

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Samples of an epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Samples of the validation set."""

    width: Annotated[int, Range(1), Level.EVERYDAY] = 64
    """Numbers of a vector."""

    num_classes: Annotated[int, Range(2), Level.EVERYDAY] = 10
    """Number of classes."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch."""
        inputs = Shape("float32", (num_samples, self.width))
        return Shapes(inputs, Shape("int64", (num_samples,)), "classification")

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Return what `open_synthetic_vectors` does."""
        return open_synthetic_vectors(self)


@dataclass
class SyntheticImagesConfig(ImageDataConfig):
    """Images and their classes, made from the sample's number."""

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Samples of an epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Samples of the validation set."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Return what `open_synthetic_images` does."""
        return open_synthetic_images(self)


@dataclass
class SyntheticMasksConfig(ImageDataConfig):
    """Images and the class of each pixel, made from the sample's number."""

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Samples of an epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Samples of the validation set."""

    height: int = field(default=64, kw_only=True)
    width: int = field(default=64, kw_only=True)
    num_classes: int = field(default=2, kw_only=True)
    """Classes of pixels; 0 is the background, the others are brighter."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch: each pixel has a class."""
        masks = Shape("int64", (num_samples, self.height, self.width))
        return super().shapes(num_samples)._replace(targets=masks, loss="segmentation")

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Return what `open_synthetic_masks` does."""
        return open_synthetic_masks(self)


@dataclass(frozen=True)
class CountingTokens:
    """Sample: first token a, then each the last plus b, modulo the vocabulary."""

    num_samples: int
    stream: int
    config: SyntheticTokensConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 tokens, [len(indices), seq_len]."""
        return self._read(indices, shift=0)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return the int64 token that follows each input, [len(indices), seq_len]."""
        return self._read(indices, shift=1)

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.num_samples}/{self.stream}/{self.config}"

    def _read(self, indices: Sequence[int], shift: int) -> Tensor:
        modulus = self.config.vocab_size
        numbers = np.asarray(indices, np.uint64)
        seed = self.config.seed
        first = _remainder(hash_words(seed, self.stream, numbers, 0), modulus)
        stride = _remainder(hash_words(seed, self.stream, numbers, 1), modulus)
        places = np.arange(shift, shift + self.config.seq_len)
        return torch.from_numpy((first[:, None] + stride[:, None] * places) % modulus)


@dataclass(frozen=True)
class ClassifiedVectors:
    """Sample: numbers uniform in [-1, 1), and the class that a fixed linear map ranks highest."""

    num_samples: int
    stream: int
    config: SyntheticVectorsConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 vectors, [len(indices), width]."""
        return torch.from_numpy(self._vectors(indices).astype(np.float32))

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes, [len(indices)]."""
        width, num_classes = self.config.width, self.config.num_classes
        cells = np.arange(width * num_classes, dtype=np.uint64)
        mapping = _uniform(hash_words(self.config.seed, _SHARED, cells, 0))
        scores = self._vectors(indices) @ mapping.reshape(width, num_classes)
        return torch.from_numpy(scores.argmax(axis=1))

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.num_samples}/{self.stream}/{self.config}"

    def _vectors(self, indices: Sequence[int]) -> npt.NDArray[np.float64]:
        numbers = np.asarray(indices, np.uint64)[:, None]
        places = np.arange(self.config.width, dtype=np.uint64)
        return _uniform(hash_words(self.config.seed, self.stream, numbers, places))


@dataclass(frozen=True)
class ClassifiedImages:
    """Sample: a class drawn at random, and its picture under as much noise, in [-1, 1).

    The class comes first, since a map from pixels to classes, as vectors have it, would be far
    larger than the images.
    """

    num_samples: int
    stream: int
    config: SyntheticImagesConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images, [len(indices), channels, height, width]."""
        config = self.config
        shape = (config.channels, config.height, config.width)
        classes, places = np.unique(self._classes(indices), return_inverse=True)
        numbers = np.asarray(indices, np.uint64)
        noise = self._pixels(self.stream, numbers)
        pictures = self._pixels(_SHARED, classes.astype(np.uint64))
        images = 0.5 * (noise + pictures[places])
        return torch.from_numpy(images.astype(np.float32).reshape(len(numbers), *shape))

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes, [len(indices)]."""
        return torch.from_numpy(self._classes(indices))

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.num_samples}/{self.stream}/{self.config}"

    def _classes(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        numbers = np.asarray(indices, np.uint64)
        words = hash_words(self.config.seed, self.stream, numbers, 0)
        return _remainder(words, self.config.num_classes)

    def _pixels(self, stream: int, numbers: Words) -> npt.NDArray[np.float64]:
        num_pixels = self.config.channels * self.config.height * self.config.width
        # From 1 up: 0 is the word of the class.
        places = np.arange(1, num_pixels + 1, dtype=np.uint64)
        return _uniform(hash_words(self.config.seed, stream, numbers[:, None], places))


@dataclass(frozen=True)
class MaskedImages:
    """Sample: a rectangle of one class on a ground of class 0, under as much noise, in [-1, 1).

    The higher the class, the brighter its pixels; sides are a quarter to three quarters of the
    image's.
    """

    num_samples: int
    stream: int
    config: SyntheticMasksConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images, [len(indices), channels, height, width]."""
        config = self.config
        shape = (len(indices), config.channels, config.height, config.width)
        # From 5 up: the words below are those of the rectangle.
        places = np.arange(5, 5 + config.channels * config.height * config.width, dtype=np.uint64)
        noise = _uniform(self._words(indices, places)).reshape(shape)
        level = 2.0 * self._masks(indices) / (config.num_classes - 1) - 1.0
        return torch.from_numpy((0.5 * (noise + level[:, None])).astype(np.float32))

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes of the pixels, [len(indices), height, width]."""
        return torch.from_numpy(self._masks(indices))

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.num_samples}/{self.stream}/{self.config}"

    def _masks(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        words = self._words(indices, np.arange(5, dtype=np.uint64))
        rows = _interval(words[:, 0], words[:, 1], self.config.height)
        columns = _interval(words[:, 2], words[:, 3], self.config.width)
        classes = 1 + _remainder(words[:, 4], self.config.num_classes - 1)
        return np.where(rows[:, :, None] & columns[:, None, :], classes[:, None, None], 0)

    def _words(self, indices: Sequence[int], places: Words) -> Words:
        numbers = np.asarray(indices, np.uint64)
        return hash_words(self.config.seed, self.stream, numbers[:, None], places)


def open_synthetic_tokens(config: SyntheticTokensConfig) -> SyntheticSource:
    """Return token sequences that a model learns by finding each one's stride."""
    return SyntheticSource(
        CountingTokens(config.num_samples, _TRAIN, config),
        CountingTokens(config.num_validation_samples, _VALIDATION, config),
        "token_cross_entropy",
    )


def open_synthetic_vectors(config: SyntheticVectorsConfig) -> SyntheticSource:
    """Return vectors with classes that one linear layer can learn."""
    return SyntheticSource(
        ClassifiedVectors(config.num_samples, _TRAIN, config),
        ClassifiedVectors(config.num_validation_samples, _VALIDATION, config),
        "classification",
    )


def open_synthetic_images(config: SyntheticImagesConfig) -> SyntheticSource:
    """Return images with classes that one linear layer can learn."""
    return SyntheticSource(
        ClassifiedImages(config.num_samples, _TRAIN, config),
        ClassifiedImages(config.num_validation_samples, _VALIDATION, config),
        "classification",
    )


def open_synthetic_masks(config: SyntheticMasksConfig) -> SyntheticSource:
    """Return images and masks: a rectangle to be found in each."""
    return SyntheticSource(
        MaskedImages(config.num_samples, _TRAIN, config),
        MaskedImages(config.num_validation_samples, _VALIDATION, config),
        "segmentation",
    )


def _interval(length: Words, start: Words, side: int) -> npt.NDArray[np.bool_]:
    """Return which of `side` pixels are within an interval drawn from two words, a row each."""
    lengths = side // 4 + _remainder(length, side // 2 + 1)
    free = (side + 1 - np.maximum(lengths, 1)).astype(np.uint64)
    starts = (start % free).astype(np.int64)
    places = np.arange(side)
    inside = (places >= starts[:, None]) & (places < (starts + np.maximum(lengths, 1))[:, None])
    return np.asarray(inside)


def _remainder(words: Words, modulus: int) -> npt.NDArray[np.int64]:
    return (words % np.uint64(modulus)).astype(np.int64)


def _uniform(words: Words) -> npt.NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
