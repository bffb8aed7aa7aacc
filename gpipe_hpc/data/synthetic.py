"""Synthetic data, computed from the sample index alone and therefore equal on every machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Final

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

# Random streams: one per split, and one for parameters that the splits share.
_TRAIN: Final = 1
_VALIDATION: Final = 2
_SHARED: Final = 3


@dataclass(frozen=True)
class SyntheticSource:
    """Training and validation sets of synthetic samples, with the name of the loss."""

    train: Dataset
    validation: Dataset
    loss: str
    corrupt: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def baseline(self) -> float | None:
        """Return None: synthetic data has no meaningful baseline loss."""
        return None


@dataclass
class SyntheticTokensConfig(TokenDataConfig):
    """Settings for token sequences that are computed from the sample index."""

    is_computed: ClassVar[bool] = True

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Number of samples per epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Number of validation samples."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Open the data with `open_synthetic_tokens`."""
        return open_synthetic_tokens(self)


@dataclass
class SyntheticVectorsConfig(DataConfig):
    """Settings for vectors and their classes that are computed from the sample index."""

    is_computed: ClassVar[bool] = True

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Number of samples per epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Number of validation samples."""

    width: Annotated[int, Range(1), Level.EVERYDAY] = 64
    """Length of each vector."""

    num_classes: Annotated[int, Range(2), Level.EVERYDAY] = 10
    """Number of classes."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch of `num_samples`."""
        inputs = Shape("float32", (num_samples, self.width))
        return Shapes(inputs, Shape("int64", (num_samples,)), "classification")

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Open the data with `open_synthetic_vectors`."""
        return open_synthetic_vectors(self)


@dataclass
class SyntheticImagesConfig(ImageDataConfig):
    """Settings for images and their classes that are computed from the sample index."""

    is_computed: ClassVar[bool] = True

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Number of samples per epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Number of validation samples."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Open the data with `open_synthetic_images`."""
        return open_synthetic_images(self)


@dataclass
class SyntheticMasksConfig(ImageDataConfig):
    """Settings for images and classes of their pixels that are computed from the sample index."""

    is_computed: ClassVar[bool] = True

    num_samples: Annotated[int, Range(1), Level.EVERYDAY] = 4096
    """Number of samples per epoch."""

    num_validation_samples: Annotated[int, Range(0), Level.EVERYDAY] = 256
    """Number of validation samples."""

    height: int = field(default=64, kw_only=True)
    width: int = field(default=64, kw_only=True)
    num_classes: int = field(default=2, kw_only=True)
    """Number of pixel classes; 0 is the background, the others are brighter."""

    seed: Annotated[int, Level.EVERYDAY] = 0
    """Seed of the samples."""

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch of `num_samples`, with one class per pixel."""
        masks = Shape("int64", (num_samples, self.height, self.width))
        return super().shapes(num_samples)._replace(targets=masks, loss="segmentation")

    def open(self, seed: int, spare: Path | None) -> SyntheticSource:
        """Open the data with `open_synthetic_masks`."""
        return open_synthetic_masks(self)


@dataclass(frozen=True)
class CountingTokens:
    """Arithmetic token sequences: random first token and stride, modulo the vocabulary size."""

    num_samples: int
    stream: int
    config: SyntheticTokensConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 tokens of shape [len(indices), seq_len]."""
        return self._read(indices, shift=0)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return the next token of each input, int64 of shape [len(indices), seq_len]."""
        return self._read(indices, shift=1)

    def digest(self) -> str:
        """Return a digest of the settings that determine the samples."""
        return _digest(self.num_samples, self.stream, self.config)

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
    """Vectors uniform in [-1, 1), classified by the argmax of a fixed random linear map."""

    num_samples: int
    stream: int
    config: SyntheticVectorsConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 vectors of shape [len(indices), width]."""
        return torch.from_numpy(self._vectors(indices).astype(np.float32))

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes of shape [len(indices)]."""
        width, num_classes = self.config.width, self.config.num_classes
        cells = np.arange(width * num_classes, dtype=np.uint64)
        mapping = _uniform(hash_words(self.config.seed, _SHARED, cells, 0))
        scores = self._vectors(indices) @ mapping.reshape(width, num_classes)
        return torch.from_numpy(scores.argmax(axis=1))

    def digest(self) -> str:
        """Return a digest of the settings that determine the samples."""
        return _digest(self.num_samples, self.stream, self.config)

    def _vectors(self, indices: Sequence[int]) -> npt.NDArray[np.float64]:
        numbers = np.asarray(indices, np.uint64)[:, None]
        places = np.arange(self.config.width, dtype=np.uint64)
        return _uniform(hash_words(self.config.seed, self.stream, numbers, places))


@dataclass(frozen=True)
class ClassifiedImages:
    """Images in [-1, 1): the mean of a fixed random image of the class and of random noise.

    The class is drawn first and determines the image. A linear map from pixels to classes, as in
    `ClassifiedVectors`, would be far larger than the images.
    """

    num_samples: int
    stream: int
    config: SyntheticImagesConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images of shape [len(indices), channels, height, width]."""
        config = self.config
        shape = (config.channels, config.height, config.width)
        classes, places = np.unique(self._classes(indices), return_inverse=True)
        numbers = np.asarray(indices, np.uint64)
        noise = self._pixels(self.stream, numbers)
        pictures = self._pixels(_SHARED, classes.astype(np.uint64))
        images = 0.5 * (noise + pictures[places])
        return torch.from_numpy(images.astype(np.float32).reshape(len(numbers), *shape))

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 classes of shape [len(indices)]."""
        return torch.from_numpy(self._classes(indices))

    def digest(self) -> str:
        """Return a digest of the settings that determine the samples."""
        return _digest(self.num_samples, self.stream, self.config)

    def _classes(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        numbers = np.asarray(indices, np.uint64)
        words = hash_words(self.config.seed, self.stream, numbers, 0)
        return _remainder(words, self.config.num_classes)

    def _pixels(self, stream: int, numbers: Words) -> npt.NDArray[np.float64]:
        num_pixels = self.config.channels * self.config.height * self.config.width
        # Word 0 is used for the class.
        places = np.arange(1, num_pixels + 1, dtype=np.uint64)
        return _uniform(hash_words(self.config.seed, stream, numbers[:, None], places))


@dataclass(frozen=True)
class MaskedImages:
    """Images in [-1, 1) that show a rectangle of one class on a background of class 0, with noise.

    Higher classes have brighter pixels. The sides of the rectangle are a quarter to three quarters
    of the sides of the image.
    """

    num_samples: int
    stream: int
    config: SyntheticMasksConfig

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return float32 images of shape [len(indices), channels, height, width]."""
        config = self.config
        shape = (len(indices), config.channels, config.height, config.width)
        # Words 0 to 4 are used for the rectangle.
        places = np.arange(5, 5 + config.channels * config.height * config.width, dtype=np.uint64)
        noise = _uniform(self._words(indices, places)).reshape(shape)
        level = 2.0 * self._masks(indices) / (config.num_classes - 1) - 1.0
        return torch.from_numpy((0.5 * (noise + level[:, None])).astype(np.float32))

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Tensor:
        """Return int64 pixel classes of shape [len(indices), height, width]."""
        return torch.from_numpy(self._masks(indices))

    def digest(self) -> str:
        """Return a digest of the settings that determine the samples."""
        return _digest(self.num_samples, self.stream, self.config)

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
    """Create token sequences; a model can learn the stride of each sequence."""
    return SyntheticSource(
        CountingTokens(config.num_samples, _TRAIN, config),
        CountingTokens(config.num_validation_samples, _VALIDATION, config),
        "token_cross_entropy",
    )


def open_synthetic_vectors(config: SyntheticVectorsConfig) -> SyntheticSource:
    """Create vectors whose classes one linear layer can learn."""
    return SyntheticSource(
        ClassifiedVectors(config.num_samples, _TRAIN, config),
        ClassifiedVectors(config.num_validation_samples, _VALIDATION, config),
        "classification",
    )


def open_synthetic_images(config: SyntheticImagesConfig) -> SyntheticSource:
    """Create images whose classes one linear layer can learn."""
    return SyntheticSource(
        ClassifiedImages(config.num_samples, _TRAIN, config),
        ClassifiedImages(config.num_validation_samples, _VALIDATION, config),
        "classification",
    )


def open_synthetic_masks(config: SyntheticMasksConfig) -> SyntheticSource:
    """Create images that show a rectangle each, and the class of each pixel as target."""
    return SyntheticSource(
        MaskedImages(config.num_samples, _TRAIN, config),
        MaskedImages(config.num_validation_samples, _VALIDATION, config),
        "segmentation",
    )


def _digest(num_samples: int, stream: int, config: DataConfig) -> str:
    """Return a digest of the settings that determine the samples, which workers do not."""
    alike = replace(config, workers=DataConfig.workers, prefetch=DataConfig.prefetch)
    return f"{num_samples}/{stream}/{alike}"


def _interval(length: Words, start: Words, side: int) -> npt.NDArray[np.bool_]:
    """Return a mask [samples, side] of one random pixel interval per sample."""
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
